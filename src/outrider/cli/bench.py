"""``outrider bench``: what speculation gains and costs, against plain decoding, in turns."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from outrider.cli import options as o
from outrider.cli.bench_results import Csv, Html, check_places, tell
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.cli.screen import Screen
    from outrider.engine.prompts import PromptRecord
    from outrider.lab.bench import Bench, Turns
    from outrider.lab.configuration import Configuration
    from outrider.lab.peers import Peer
    from outrider.lab.record import Log, Record

app = typer.Typer()

_BARE = "none"
_INTERRUPTED = 130
_MEASURING = "Measuring"
_RESULTS = "Results"
_SPECULATION = "Speculation"

# What may not change when a log is gone on with: figures of two machines, or of two versions, are
# not one measurement.
_FIXED = (
    "target", "prompts_sha256", "request", "temperatures", "batches", "configurations", "seed",
    "turns", "runtime", "dtype", "adapter_mode", "system", "cpu", "threads", "gpu", "outrider",
    "torch", "transformers", "numba", "peers", "cluster",
)  # fmt: skip
_FIXED_OF_TARGET = ("fingerprint", "precision", "device", "class", "profile", "peers")


@app.command()
@o.sampling_options(temperature=[0.0])
def bench(
    *,
    target: o.TargetName = "smollm2-135m",
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            help="Folder of a LoRA adapter: a target of its own; none is the bare target. May be "
            "repeated.",
            rich_help_panel="Model",
        ),
    ] = None,
    adapter_mode: o.AdapterMode = "merged",
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            help="drafter=D,rule=R,draft-length=N,label=NAME; may be repeated.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    drafter: o.DrafterNames = None,
    rule: o.RuleNames = None,
    draft_length: o.DraftLengths = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            help="Another program in the same turns: transformers[:assisted=PATH|:lookup=N], "
            "llama.cpp[:server=PATH,lookup|draft=PATH], openvino[:model=PATH,lookup=N], "
            "endpoint:URL[,model=NAME]; may be repeated.",
            rich_help_panel=_MEASURING,
        ),
    ] = None,
    strict: o.Strict = False,
    prompts: o.Prompts = "bundled",
    limit: o.Limit = None,
    max_tokens: o.MaxTokens = 128,
    repeats: Annotated[
        int,
        typer.Option(
            "--repeats",
            min=1,
            help="Times that all is done; steadies each prompt's times.",
            rich_help_panel=_MEASURING,
        ),
    ] = 1,
    turns: Annotated[
        Literal["token", "prompt"],
        typer.Option(
            "--turns",
            help="By what all take turns: token, or prompt (as on GPUs always).",
            rich_help_panel=_MEASURING,
        ),
    ] = "token",
    batch: Annotated[
        list[int] | None,
        typer.Option(
            "--batch",
            help="Sequences decoded side by side; may be repeated.",
            rich_help_panel=_MEASURING,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Go on past end tokens: equally long.", rich_help_panel=_MEASURING
        ),
    ] = False,
    entropy: Annotated[
        bool,
        typer.Option(
            help="Measure the target's entropy at each token, between the timings.",
            rich_help_panel=_MEASURING,
        ),
    ] = True,
    sampling: dict[str, Any],
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            min=0,
            help="Of samples and of the order of turns.",
            rich_help_panel="Sampling",
        ),
    ] = 0,
    runtime: o.Runtime = "auto",
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    ray: o.OnRay = False,
    ray_address: o.RayAddress = "auto",
    workers: o.RayWorkers = None,
    log_file: Annotated[
        Path | None,
        typer.Option(
            "--log",
            help="Keeps every generation; the same command goes on where it stopped.",
            rich_help_panel=_RESULTS,
        ),
    ] = None,
    csv_file: Csv = None,
    page: Html = None,
    as_json: o.AsJson = False,
) -> None:
    """Measure drafters, rules and draft lengths against plain decoding.

    Plain decoding is always measured too, on the same target, prompts and sampling values. All
    take turns token by token, in a shuffled order, so that a drift of the machine's speed falls
    on all. With neither --config nor --drafter, what generate does by itself is measured.

    Interrupt it at any time: what is finished is told, and with --log the same command goes on.
    outrider report tells again what a log holds.
    """
    from outrider.cli.screen import Screen
    from outrider.lab.record import Log

    check_places(csv_file, page)
    screen = Screen()
    with ExitStack() as stack:
        if log_file is None:
            log_file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "bench.jsonl"
        log = Log(log_file)
        others = {name: value for name, value in sampling.items() if name != "temperature"}
        wanted = _Wanted(
            configurations=_configurations(config, drafter, rule, draft_length),
            peers=_peers(peer or []),
            temperatures=sampling["temperature"],
            batches=batch or [1],
            request={**others, "max_tokens": max_tokens, "ignore_eos": ignore_eos},
            repeats=repeats,
            seed=seed,
            entropies=entropy,
            turns=turns,
        )
        load = {
            "runtime": runtime, "dtype": dtype, "device": device, "adapter_mode": adapter_mode
        }  # fmt: skip
        interrupted = _measure(
            screen, log, wanted, target, adapter or [_BARE], load, strict, prompts, limit,
            (ray_address, workers) if ray else None,
        )  # fmt: skip
        tell(screen, log, csv_file, page, as_json)
    if interrupted:
        raise typer.Exit(_INTERRUPTED)


class _Wanted:
    """What is to be measured, apart from the target and the prompts."""

    def __init__(
        self,
        *,
        configurations: list[Configuration],
        peers: list[Peer],
        temperatures: list[float],
        batches: list[int],
        request: dict[str, Any],
        repeats: int,
        seed: int,
        entropies: bool,
        turns: Turns,
    ) -> None:
        self.configurations = configurations
        self.peers = peers
        self.temperatures = temperatures
        self.batches = batches
        self.request = request
        self.repeats = repeats
        self.seed = seed
        self.entropies = entropies
        self.turns = turns

    def check(self, load: Mapping[str, Any]) -> None:
        """Tell what is wrong before a model is loaded for it."""
        from outrider.cli.generate import check_request
        from outrider.lab.bench import check_measurable

        for temperature in self.temperatures:
            check_request({**self.request, "temperature": temperature})
        check_measurable(
            self.configurations,
            self.temperatures,
            batches=self.batches,
            peers=self.peers,
            sampling=self._sampling,
            **load,
        )

    @property
    def _sampling(self) -> dict[str, Any]:
        others = ("max_tokens", "ignore_eos")
        return {name: value for name, value in self.request.items() if name not in others}

    def bench(self, engine: Any, prompts: Sequence[PromptRecord], adapter: str) -> Bench:
        """The measurements of one target."""
        from outrider.lab.bench import Bench

        options = self.options(adapter)
        return Bench(engine, prompts, self.configurations, peers=self.peers, **options)

    def options(self, adapter: str) -> dict[str, Any]:
        """Of ``Bench``, besides what is compared."""
        return {
            "temperatures": self.temperatures,
            "batches": self.batches,
            "max_tokens": self.request["max_tokens"],
            "repeats": self.repeats,
            "seed": self.seed,
            "sampling": self._sampling,
            "ignore_eos": self.request["ignore_eos"],
            "entropies": self.entropies,
            "turns": self.turns,
            "adapter": adapter,
        }

    def conditions(self) -> dict[str, Any]:
        """For the log."""
        from dataclasses import asdict

        told = {
            "request": self.request,
            "temperatures": self.temperatures,
            "batches": self.batches,
            "configurations": [asdict(one) for one in self.configurations],
            "seed": self.seed,
            "turns": self.turns,
        }
        # Not an empty list: logs from before there were peers are gone on with.
        return told | ({"peers": [{"label": p.label} for p in self.peers]} if self.peers else {})


def _configurations(
    config: list[str] | None,
    drafters: list[str] | None,
    rules: list[str] | None,
    lengths: list[str] | None,
) -> list[Configuration]:
    from outrider.lab.configuration import combine, parse_configuration

    found = [parse_configuration(text) for text in config or ()]
    if drafters or rules or lengths or not found:
        found += combine(drafters or [], rules or [], lengths or [])
    return found


def _peers(names: list[str]) -> list[Peer]:
    from outrider.lab.peers import parse_peer

    return [parse_peer(name) for name in names]


def _measure(
    screen: Screen,
    log: Log,
    wanted: _Wanted,
    target: str,
    adapters: list[str],
    load: dict[str, Any],
    strict: bool,
    source: str,
    limit: int | None,
    cluster: tuple[str, int | None] | None,
) -> bool:
    """Fill the log; returns whether it was interrupted before the end."""
    from outrider.engine.prompts import read_prompts
    from outrider.lab.provenance import machine, software
    from outrider.models.adapter import read_adapter

    prompts = read_prompts(source, limit=limit)
    wanted.check(load)
    if cluster and wanted.peers:
        raise UsageError("Peers run on one machine; got --peer and --ray.", hint="Leave one out.")
    if len(set(adapters)) < len(adapters):
        raise UsageError(f"An adapter is given twice: {adapters}.", hint="Leave one out.")
    for name in adapters:
        if name != _BARE:
            read_adapter(Path(name).expanduser())  # not after hours with the one before
    turns = len(prompts) * len(wanted.temperatures) * len(wanted.batches) * wanted.repeats
    planned = len(adapters) * turns * (1 + len(wanted.configurations) + len(wanted.peers))
    extent = {"adapters": adapters, "repeats": wanted.repeats, "planned": planned}
    conditions = {
        "command": shlex.join(["outrider", *sys.argv[1:]]),
        **software(),
        **machine(),
        "target": target,
        "runtime": load["runtime"],
        "dtype": load["dtype"],
        "adapter_mode": load["adapter_mode"],
        "prompts": source,
        "prompt_ids": [prompt.id for prompt in prompts],
        "prompts_sha256": _digest(prompts),
        **wanted.conditions(),
        **extent,
    }
    if log.started:  # what is known before a model is loaded is told then
        log.begin(conditions, [name for name in _FIXED if not (cluster and name == "cluster")])
    done = {record.key for record in log.records()} if log.started else set()
    try:
        with _bar(screen, planned, len(done)) as advance:
            for name in adapters:
                adapter = "" if name == _BARE else name
                measuring = (
                    _on_cluster(advance, wanted, prompts, target, adapter, load, strict, *cluster)
                    if cluster
                    else _here(screen, advance, wanted, prompts, target, adapter, load, strict)
                )
                with measuring as (place, about, run):
                    log.begin(conditions | place, _FIXED)
                    log.update(extent | place)
                    log.target(adapter or "bare", about, _FIXED_OF_TARGET)
                    for record in run(done):
                        log.add(record)
                        advance(f"{prompts[record.prompt].id}, {record.configuration}", 1)
                del run  # and its engine, before the next one comes into memory
    except KeyboardInterrupt:
        if not log.started or next(log.records(), None) is None:
            raise
        return True
    return False


@contextmanager
def _here(
    screen: Screen,
    advance: Callable[[str, int], None],
    wanted: _Wanted,
    prompts: Sequence[PromptRecord],
    target: str,
    adapter: str,
    load: dict[str, Any],
    strict: bool,
) -> Iterator[tuple[dict[str, Any], dict[str, Any], Callable[[Collection[Any]], Iterator[Record]]]]:
    """Measuring in this process: conditions of the place, what is known of the target, and how to
    get the records that there are not yet."""
    from outrider.cli.screen import load_engine
    from outrider.lab.peers import running

    engine = load_engine(
        screen, target, drafter="none", strict=strict, adapter=adapter or None, **load
    )
    bench = wanted.bench(engine, prompts, adapter)
    with running(bench.peers, bench.stage):
        advance("warming up", 0)
        bench.warm_up()
        yield {}, bench.about(), bench.run


@contextmanager
def _on_cluster(
    advance: Callable[[str, int], None],
    wanted: _Wanted,
    prompts: Sequence[PromptRecord],
    target: str,
    adapter: str,
    load: dict[str, Any],
    strict: bool,
    address: str,
    count: int | None,
) -> Iterator[tuple[dict[str, Any], dict[str, Any], Callable[[Collection[Any]], Iterator[Record]]]]:
    """The same on a cluster's workers."""
    from dataclasses import asdict

    from outrider.engine.cluster import connected, team_of, workers
    from outrider.lab.spread import MakeMeasurer, spread_run

    options = {**load, "drafter": "none", "strict": strict, "adapter": adapter or None}
    make = MakeMeasurer(target, options, prompts, wanted.configurations, wanted.options(adapter))
    with connected(address) as nodes:
        count, share = team_of(nodes, count, load["device"])
        advance(f"loading and warming up on {count} workers", 0)
        with workers(make, count, share) as team:
            told = team.each("about")
            place = {
                "cluster": {"workers": count, **asdict(share)},
                "workers": {name: machine for name, machine, _ in told},
            }

            def run(done: Collection[Any]) -> Iterator[Record]:
                return spread_run(team, len(prompts), wanted.batches, done)

            yield place, told[0][2], run


def _digest(prompts: Sequence[PromptRecord]) -> str:
    from dataclasses import asdict
    from hashlib import sha256

    text = json.dumps([asdict(prompt) for prompt in prompts], sort_keys=True)
    return sha256(text.encode()).hexdigest()


@contextmanager
def _bar(screen: Screen, planned: int, done: int) -> Iterator[Any]:
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=screen.err,
        transient=True,
        disable=not screen.err.is_terminal,
    )
    task = bar.add_task("measuring", total=planned, completed=done)

    def advance(doing: str, count: int) -> None:
        bar.start()  # not before: loading has a sign of life of its own
        bar.update(task, description=escape(doing), advance=count)

    try:
        yield advance
    finally:
        bar.stop()

"""``outrider audit``: does the output have the law of the target alone?"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options as o
from outrider.cli.places import check_place
from outrider.errors import OutriderError, PromptError, UsageError
from outrider.lab.configuration import parse_length

if TYPE_CHECKING:
    from outrider.cli.screen import Screen

app = typer.Typer()

_PROMPT = "Monday is good. Tuesday is good. Wednesday is"  # repeats itself: lookups draft
_TOY_PROMPT = "aaa"  # letters that every toy has
_EXIT = {
    "consistent": 0, "different": 1, "not exact by design": 1, "not enough samples": 3,
    "nothing tested": 3,
}  # fmt: skip
_LOOKS = 6
_SERVERS = "Servers"


def _without_a_verdict(command: Callable[..., None]) -> Callable[..., None]:
    """Errors end with 2: a model that is not there says nothing of a law."""

    @wraps(command)
    def told(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except (OutriderError, OSError) as error:
            error.exit_code = 2  # type: ignore[union-attr]
            raise

    return told


@app.command()
@_without_a_verdict
@o.sampling_options(temperature=1.0)
def audit(
    *,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="A text to continue, may be repeated; one is built in."),
    ] = None,
    target: o.TargetName = "smollm2-135m",
    adapter: o.Adapter = None,
    adapter_mode: o.AdapterMode = "merged",
    drafter: o.DrafterName = "auto",
    strict: o.Strict = False,
    rule: o.RuleName = "auto",
    draft_length: o.DraftLength = "auto",
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="Outputs of each kind for each prompt.")
    ] = 1000,
    sequential: Annotated[
        bool,
        typer.Option("--sequential", help=f"Look up to {_LOOKS} times, and stop once it is clear."),
    ] = False,
    max_tokens: o.MaxTokens = 3,
    sampling: dict[str, Any],
    stop: o.Stop = None,
    stop_token_id: o.StopTokenId = None,
    alpha: Annotated[
        float, typer.Option("--alpha", help="Probability of a false alarm, over all tests.")
    ] = 1e-3,
    sampled: Annotated[
        bool, typer.Option("--sampled", help="Draw samples from a toy too, not its exact law.")
    ] = False,
    walk: Annotated[
        bool,
        typer.Option(
            "--enumerate",
            help="Walk every course of chance, where few tokens can come; draw no samples.",
        ),
    ] = False,
    remember: Annotated[
        bool,
        typer.Option(
            "--remember",
            help="Score no context twice: far quicker; leaves the model's own cache untested.",
        ),
    ] = False,
    seed: o.Seed = None,
    runtime: o.Runtime = "auto",
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    ray: o.OnRay = False,
    ray_address: o.RayAddress = "auto",
    workers: o.RayWorkers = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint", help="URL of a server that speculates.", rich_help_panel=_SERVERS
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", help="URL of the same without speculation.", rich_help_panel=_SERVERS
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Its name on both servers.", rich_help_panel=_SERVERS),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Ask for chat completions.", rich_help_panel=_SERVERS),
    ] = False,
    log: Annotated[
        Path | None,
        typer.Option("--log", help="Keeps answers; run again to go on.", rich_help_panel=_SERVERS),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", help="Requests a second at most.", rich_help_panel=_SERVERS),
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option("--concurrency", help="Requests at a time.", rich_help_panel=_SERVERS),
    ] = 1,
    page: Annotated[
        Path | None,
        typer.Option("--html", help="Write a page with the laws as pictures."),
    ] = None,
    as_json: o.AsJson = False,
) -> None:
    """Check that a configuration's outputs have the law of plain decoding.

    A toy target's law is walked exactly, and a real one's with --enumerate, each context scored
    once. Else a real one is sampled both ways and the samples are tested; under the coupled and
    greedy rules the outputs are compared token by token. With --endpoint and --against two servers
    of OpenAI's protocol are compared; a key for them is taken from OUTRIDER_API_KEY.

    Exit codes: 0 consistent, 1 different or not exact by design, 3 not enough samples, or nothing
    tested because nothing was drafted; 2 for an error, which is no verdict, 130 when interrupted.
    """
    from outrider.cli.generate import check_request
    from outrider.cli.screen import Screen
    from outrider.core.processors import Sampling

    # What is wrong is told before a model is loaded for it.
    request = {
        **sampling,
        "max_tokens": max_tokens,
        "stop": stop or (),
        "stop_token_ids": stop_token_id or (),
    }
    check_request(request)
    if not 0 < alpha < 1:
        raise UsageError(f"--alpha must be between 0 and 1; got {alpha}.")
    if any(not text for text in prompt or ()):
        raise PromptError("A prompt is empty.", hint="Say what to generate from.")
    if (endpoint is None) != (against is None):
        raise UsageError(
            "--endpoint and --against go together; got one of them.",
            hint="Name the server that speculates and one that does not.",
        )
    if ray and endpoint is not None:
        raise UsageError(
            "Servers are asked from one machine; got --endpoint and --ray.",
            hint="Leave one out; --concurrency asks several questions at a time.",
        )
    for flag, given in (
        ("--sampled", sampled),
        ("--sequential", sequential),
        ("--ray", ray),
        ("--endpoint", endpoint is not None),
    ):
        if walk and given:
            raise UsageError(
                f"--enumerate walks every course of chance here, and draws no samples; got {flag}.",
                hint=f"Leave out --enumerate or {flag}.",
            )
    length = parse_length(draft_length)
    import outrider.audit.statistics  # tells a missing scipy

    if page is not None:
        import outrider.report.audit  # noqa: F401, tells a missing jinja2 or matplotlib

        check_place(page)
    screen = Screen()
    toy = endpoint is None and target.partition(":")[0] == "toy"
    texts = prompt or [_TOY_PROMPT if toy else _PROMPT]
    # Some servers keep 32 bits of a seed.
    drawn = seed is None
    seed = secrets.randbits(62 if endpoint is None else 30) if seed is None else seed
    values = Sampling(**sampling)
    result: dict[str, Any] = {
        "prompts": texts,
        "samples": samples,
        "max_tokens": max_tokens,
        "sampling": values.to_dict(),
        "seed": seed,
    }
    tokens: dict[int, str] = {}
    if endpoint is not None and against is not None:
        result |= {"endpoint": endpoint, "against": against}
        result |= _servers(
            screen, endpoint, against, texts, samples, sampling, request,
            seed=seed, alpha=alpha, log=log, model=model, chat=chat, rate=rate,
            concurrency=concurrency,
        )  # fmt: skip
    else:
        from outrider.cli.screen import load_engine

        load: dict[str, Any] = {
            "drafter": drafter, "rule": rule, "draft_length": length, "runtime": runtime,
            "dtype": dtype, "device": device, "adapter": adapter, "adapter_mode": adapter_mode,
            "strict": strict,
        }  # fmt: skip
        engine = load_engine(screen, target, temperature=values.temperature, **load)
        if remember:
            from outrider.audit.remembered import remembering

            engine = remembering(engine)
            result["remembered"] = True
        chosen = engine.make_rule(values)
        made = engine.model
        result |= {"target": target, "drafter": engine.drafter.name, "rule": chosen.name}
        result |= {"draft_length": str(draft_length), "runtime": type(made).__name__}
        result |= {"precision": str(getattr(made, "kind", ""))}
        if not chosen.exact:
            result |= _not_exact(chosen.name)
        elif walk or (toy and not sampled and not remember):
            result |= _exact(screen, engine, texts, values, request)
        else:
            ids = [engine.encode(text) for text in texts]
            spread: AbstractContextManager[Any] = nullcontext((None, None))
            if ray:
                from outrider.audit.spread import MakeAuditor

                make = MakeAuditor(target, load, ids, request, remember)
                spread = _spread(make, ray_address, workers, device)
            with spread as (drawing, comparing):
                result |= _samples(
                    screen, engine, ids, samples, chosen.name, request, seed=seed, alpha=alpha,
                    looks=_LOOKS if sequential else 1, drawing=drawing, comparing=comparing,
                )  # fmt: skip
        result |= _idle(result)
        tokens = {
            token: engine.tokenizer.decode([token])
            for token in set(_token_ids(result))
            if 0 <= token < engine.tokenizer.vocab_size
        }
    drawn = drawn and result["method"] not in ("enumeration", "none")
    if page is not None:
        _write_page(page, result, tokens, ["--seed", str(seed)] if drawn else [])
    if as_json:
        typer.echo(json.dumps(result, ensure_ascii=False))
    else:
        from outrider.cli.findings import table

        if "comparisons" in result:
            table(screen, result)
        screen.out.print(result["sentence"], markup=False)
        if drawn:
            screen.err.print(f"To repeat it: --seed {seed}", markup=False)
        if page is not None:
            screen.err.print(f"The page is in {page}.", markup=False)
    raise typer.Exit(_EXIT[result["verdict"]])


def _idle(result: dict[str, Any]) -> dict[str, Any]:
    """A rule that never saw a draft was not put to the test, whatever the samples say."""
    if result.get("drafted_tokens") != 0 or result["verdict"] == "different":
        return {}
    idle = "Nothing was drafted, so the rule was not put to the test."
    if result["drafter"] == "none":  # as was asked for
        return {"sentence": f"{result['sentence']} {idle}"}
    hint = "Give prompts on which it drafts: for a lookup, such as repeat themselves (--prompt)."
    if result["draft_length"] == "auto":
        hint += " A fixed --draft-length drafts also where that is no quicker."
    sentence = f"Nothing tested by '{result['drafter']}': {idle} {hint} {result['sentence']}"
    return {"verdict": "nothing tested", "sentence": sentence}


def _not_exact(rule: str) -> dict[str, Any]:
    sentence = (
        f"Not exact by design: the rule '{rule}' does not keep the target's law, so it is never "
        "certified; nothing was drawn."
    )
    return {"method": "none", "verdict": "not exact by design", "sentence": sentence}


def _exact(
    screen: Screen, engine: Any, texts: list[str], values: Any, request: dict[str, Any]
) -> dict[str, Any]:
    from outrider.audit.exact import audit_exact
    from outrider.cli.findings import say_exact

    with _bar(screen, "walking") as advance:
        report = audit_exact(
            engine,
            [engine.encode(text) for text in texts],
            max_tokens=request["max_tokens"],
            sampling=values,
            stop_token_ids=request["stop_token_ids"],
            stop=request["stop"],
            advance=advance,
        )
    return report.to_dict() | {"sentence": say_exact(report, request["max_tokens"], texts)}


def _samples(
    screen: Screen,
    engine: Any,
    prompts: list[list[int]],
    samples: int,
    rule: str,
    request: dict[str, Any],
    *,
    seed: int,
    alpha: float,
    looks: int,
    drawing: Any,
    comparing: Any,
) -> dict[str, Any]:
    from outrider.audit.sampled import audit_samples, audit_tokens, equal_tokens_promised
    from outrider.cli.findings import say_samples, say_tokens

    with _bar(screen) as advance:
        if equal_tokens_promised(rule):
            tokens = audit_tokens(
                engine, prompts, samples, seed=seed, request=request, advance=advance,
                comparing=comparing,
            )  # fmt: skip
            return tokens.to_dict() | {"sentence": say_tokens(tokens)}
        report = audit_samples(
            engine, prompts, samples,
            seed=seed, request=request, alpha=alpha, looks=looks, advance=advance,
            drawing=drawing,
        )  # fmt: skip
    return report.to_dict() | {"sentence": say_samples(report)}


@contextmanager
def _spread(
    make: Any, address: str, count: int | None, device: str | None
) -> Iterator[tuple[Any, Any]]:
    """A cluster's workers, as those who draw samples and who compare tokens."""
    from outrider.audit.spread import spread_comparing, spread_drawing
    from outrider.engine.cluster import connected, team_of, workers

    with connected(address) as nodes:
        count, share = team_of(nodes, count, device)
        with workers(make, count, share) as team:
            yield spread_drawing(team, count), spread_comparing(team, count)


def _servers(
    screen: Screen,
    endpoint: str,
    against: str,
    texts: list[str],
    samples: int,
    sampling: dict[str, Any],
    request: dict[str, Any],
    **options: Any,
) -> dict[str, Any]:
    from outrider.audit.endpoints import audit_endpoints
    from outrider.cli.findings import say_endpoints
    from outrider.core.processors import Sampling

    if request["stop_token_ids"]:
        raise UsageError("--stop-token-id is not of OpenAI's protocol.", hint="Use --stop.")
    # What is neutral is left out: a server may refuse fields that are not of the protocol.
    neutral = Sampling().to_dict()
    fields = {
        name: value
        for name, value in sampling.items()
        if name == "temperature" or value != neutral[name]
    }
    fields["max_tokens"] = request["max_tokens"]
    if request["stop"]:
        fields["stop"] = list(request["stop"])
    with _bar(screen) as advance:
        report = audit_endpoints(
            endpoint, against, texts, samples,
            request=fields, api_key=os.environ.get("OUTRIDER_API_KEY"), advance=advance, **options,
        )  # fmt: skip
    return report.to_dict() | {"sentence": say_endpoints(report)}


@contextmanager
def _bar(screen: Screen, doing: str = "drawing") -> Iterator[Callable[[int, int], None]]:
    from rich.progress import Progress

    with Progress(console=screen.err, transient=True, disable=not screen.err.is_terminal) as bar:
        task = bar.add_task(doing)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _token_ids(result: dict[str, Any]) -> Iterator[int]:
    """The token ids that a result speaks of."""
    bins = [*result.get("laws", ())]
    for comparison in result.get("comparisons", ()):
        bins += [*comparison["laws"], *comparison["at_odds"]]
    for bin_ in bins:
        yield from bin_["token_ids"] or ()
    for difference in result.get("differences", ()):
        yield from (t for t in (difference["plain_token"], difference["token"]) if t is not None)


def _write_page(
    path: Path, result: dict[str, Any], tokens: dict[int, str], more: list[str]
) -> None:
    from importlib.metadata import version

    from outrider.report.audit import audit_page, write_page

    versions = {
        name: version(name) for name in ("outrider", "torch", "transformers", "numpy", "numba")
    }
    versions["Python"] = ".".join(map(str, sys.version_info[:3]))
    command = shlex.join(["outrider", *sys.argv[1:], *more])
    write_page(path, audit_page(result, texts=tokens, versions=versions, command=command))

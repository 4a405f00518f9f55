"""``outrider tune``: the fastest way to decode on this machine, found by the clock."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options as o
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.cli.screen import Screen
    from outrider.engine.profile import Choice, Profile
    from outrider.lab.configuration import Configuration
    from outrider.lab.tune import Found, Round

app = typer.Typer()

_SEARCH, _KEPT = "Search", "Profile"
_LEVEL = 0.95


@app.command()
def tune(
    *,
    target: o.TargetName = "smollm2-135m",
    adapter: o.Adapter = None,
    adapter_mode: o.AdapterMode = "merged",
    drafter: o.DrafterNames = None,
    rule: o.RuleNames = None,
    draft_length: o.DraftLengths = None,
    prompts: o.Prompts = "bundled",
    limit: o.Limit = 6,
    temperature: Annotated[
        float,
        typer.Option("--temperature", min=0.0, help="0 is greedy.", rich_help_panel=_SEARCH),
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="1 keeps all tokens.", rich_help_panel=_SEARCH)
    ] = 1.0,
    max_tokens: o.MaxTokens = 96,
    minutes: Annotated[
        float,
        typer.Option(
            "--minutes",
            min=0.0,
            help="End after so long, with what there is.",
            rich_help_panel=_SEARCH,
        ),
    ] = 30.0,
    seed: Annotated[int, typer.Option("--seed", min=0, rich_help_panel=_SEARCH)] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write no profile.", rich_help_panel=_KEPT)
    ] = False,
    show: Annotated[
        bool,
        typer.Option("--show", help="Tell the profile there is.", rich_help_panel=_KEPT),
    ] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="Delete it.", rich_help_panel=_KEPT)
    ] = False,
    runtime: o.Runtime = "auto",
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    as_json: o.AsJson = False,
) -> None:
    """Search for the drafter, rule and draft length that take the least time on your prompts.

    Many ways are timed on a few prompts, then few on many, each in turn with plain decoding. What
    is faster for certain goes into a profile, one choice for temperature 0 and one for above,
    which generate, chat and serve use by default; where nothing is, plain decoding does. Without
    --drafter, --rule and --draft-length what needs no files of yours is searched.
    """
    from outrider.cli.generate import check_request
    from outrider.cli.screen import Screen, load_engine
    from outrider.engine.profile import check_profiles
    from outrider.engine.prompts import read_prompts
    from outrider.lab.bench import Bench, check_measurable
    from outrider.lab.configuration import combine
    from outrider.lab.tune import candidates
    from outrider.lab.tune import tune as search

    if show and forget:
        raise UsageError("--show and --forget are two things.", hint="Give one of them.")
    load: dict[str, Any] = {
        "runtime": runtime, "dtype": dtype, "device": device, "adapter_mode": adapter_mode
    }  # fmt: skip
    wanted = combine([_absolute(name) for name in drafter or []], rule or [], draft_length or [])
    named = bool(drafter or rule or draft_length)
    if named:
        check_measurable(wanted, [temperature], **load)
    if not (show or forget):
        check_request({"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p})
    chosen = [] if show or forget else read_prompts(prompts, limit=limit)
    screen = Screen()
    engine = load_engine(screen, target, drafter="none", adapter=adapter, **load)
    if show or forget:
        _tell_profile(screen, engine, forget, as_json)
        return
    print_ = engine.fingerprint()
    if print_ is None and not dry_run:
        raise UsageError(
            f"'{target}' has no files to know it by again, so no profile can be kept for it.",
            hint="Add --dry-run.",
        )
    engine.follows_profile = False  # what is searched for is what it should say
    before = None
    if not dry_run:
        check_profiles()
        before = _before(screen, engine)
    greedy = temperature == 0.0
    ways = wanted if named else list(candidates(engine, greedy))
    bench = Bench(
        engine, chosen, ways, temperatures=[temperature], max_tokens=max_tokens, seed=seed,
        sampling={"top_p": top_p}, entropies=False,
    )  # fmt: skip
    screen.err.print(
        f"{len(ways)} ways on {len(bench.ids)} prompts, in turn with plain decoding. Warming up."
    )
    began = monotonic()
    bench.warm_up()
    spent_s = monotonic() - began
    screen.err.print(f"Warmed up in {spent_s:.0f} s, which counts.")

    def clock(way: Configuration, prompt: int) -> float:
        if way.is_plain:  # once a prompt
            screen.err.print(f"prompt {prompt + 1} ...", style="dim")
        record = bench.measure(way, prompt, temperature)
        return record.total_s / len(record.token_ids)

    found = search(
        ways, clock, len(bench.ids), level=_LEVEL, seed=seed, deadline_s=60 * minutes - spent_s,
        told=lambda round_: _tell_round(screen, round_),
    )  # fmt: skip
    path = None
    if print_ is not None and not dry_run:
        about: dict[str, Any] = {"prompts": prompts, "limit": limit, "max_tokens": max_tokens}
        about |= {"temperature": temperature, "top_p": top_p, "seed": seed}
        path = _keep(engine, before, found, greedy, about)
    _tell_found(screen, found, path, as_json)


def _absolute(drafter: str) -> str:
    """A drafter's files by their whole paths: a profile is used from any folder."""
    name, mark, argument = drafter.partition(":")
    path = argument.partition("#")[0].partition(",")[0]
    if not path or not Path(path).exists():
        return drafter
    return f"{name}{mark}{Path(path).resolve()}{argument[len(path) :]}"


def _before(screen: Screen, engine: Any) -> Profile | None:
    """The profile that there is; one that is broken is as good as none, and told."""
    from outrider.engine.profile import find_profile

    try:
        return find_profile(engine.fingerprint(), engine.model)
    except UsageError as error:
        screen.err.print(f"{error.problem} It will be replaced.")
        return None


def _keep(
    engine: Any, before: Profile | None, found: Found, greedy: bool, about: dict[str, Any]
) -> str:
    """Write the choice beside the one for other temperatures."""
    from dataclasses import replace

    from outrider.engine.profile import Profile, here, write_profile

    print_ = engine.fingerprint()
    profile = before or Profile(engine.model.name, print_.to_dict(), here(engine.model))
    kind = "greedy" if greedy else "sampled"
    choice: dict[str, Any] = {kind: found.choice(_LEVEL)}
    return str(write_profile(replace(profile, **choice, about=profile.about | {kind: about})))


def _tell_round(screen: Screen, round_: Round) -> None:
    from rich.table import Table

    screen.err.print(f"\nAfter {round_.seen} prompts:")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("way", "speed-up", "95 %", ""):
        left = name in ("way", "")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    for s in round_.standings:
        gone = s.configuration in round_.dropped
        interval = f"{s.low:.2f} to {s.high:.2f}" if s.low > 0 else ""
        table.add_row(
            s.configuration.label, f"{s.speedup:.2f}", interval, "dropped" if gone else "",
            style="dim" if gone else "",
        )  # fmt: skip
    screen.err.print(table)


def _tell_found(screen: Screen, found: Found, path: str | None, as_json: bool) -> None:
    from outrider.lab.tune import ENOUGH

    s = found.leader
    if as_json:
        told = {
            "choice": asdict(found.choice(_LEVEL)), "certain": found.best is not None,
            "leader": asdict(s), "stopped": found.stopped, "profile": path,
            "rounds": [asdict(round_) for round_ in found.rounds],
        }  # fmt: skip
        typer.echo(json.dumps(told))
        return
    if found.stopped:
        screen.err.print("Time ran out before the search was over: --minutes gives it more.")
    sides = f"{_LEVEL:.0%} interval {s.low:.2f} to {s.high:.2f}, " if s.low > 0 else ""
    interval = f"{s.speedup:.2f} times plain decoding ({sides}{len(s.ratios)} prompts)"
    if found.best is not None:
        sure = f"At least {s.low - 1:.0%} of it is certain."
        screen.out.print(f"The fastest way: {s.configuration.label}, {interval}. {sure}")
    else:
        screen.out.print(
            f"Nothing is faster than plain decoding for certain. The best was "
            f"{s.configuration.label}, {interval}. Plain decoding stays."
        )
        if len(s.ratios) < ENOUGH:
            screen.out.print(f"At least {2 * ENOUGH} prompts are needed to be certain of anything.")
    if path is not None:
        screen.out.print(f"Kept in {path}; outrider tune --forget deletes it.")


def _tell_profile(screen: Screen, engine: Any, forget: bool, as_json: bool) -> None:
    from outrider.engine.profile import find_profile, forget_profile

    print_ = engine.fingerprint()
    if forget:
        gone = print_ is not None and forget_profile(print_, engine.model)
        if as_json:
            typer.echo(json.dumps({"forgotten": gone}))
        else:
            screen.out.print("Deleted." if gone else "There was none.")
        return
    profile = find_profile(print_, engine.model)
    if as_json:
        typer.echo(json.dumps(None if profile is None else asdict(profile)))
        return
    if profile is None:
        screen.out.print(f"There is no profile for '{engine.model.name}' on this machine.")
        return
    for words, choice in (
        ("temperature 0", profile.greedy), ("above temperature 0", profile.sampled)
    ):  # fmt: skip
        screen.out.print(f"{words}: {_choice_in_words(choice)}")


def _choice_in_words(choice: Choice | None) -> str:
    if choice is None:
        return "not tuned"
    if choice.drafter == "none":
        return f"plain decoding, for nothing was faster for certain on {choice.prompts} prompts"
    return (
        f"--drafter {choice.drafter} --rule {choice.rule} --draft-length {choice.draft_length}, "
        f"{choice.speedup:.2f} times plain decoding ({choice.level:.0%} interval {choice.low:.2f} "
        f"to {choice.high:.2f}, {choice.prompts} prompts)"
    )

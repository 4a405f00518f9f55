"""``outrider plan``: what speculation can be expected to gain, before it is built or bought."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options as o
from outrider.cli.places import check_place
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.cli.screen import Screen
    from outrider.core.price import Price
    from outrider.lab.plan import Machine, Plan, Side

__all__ = ["app"]

app = typer.Typer()

_GIVEN, _MEASURED = "Given", "Measured"
_SIZES = "Sizes and machine"
_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


@app.command()
@o.sampling_options()
def plan(
    *,
    alpha: Annotated[
        float | None,
        typer.Option(
            "--alpha", "-a", help="Chance that a drafted token stands.", rich_help_panel=_GIVEN
        ),
    ] = None,
    cost_ratio: Annotated[
        float | None,
        typer.Option(
            "--cost-ratio",
            "-s",
            help="Time of a plain pass of the target over that of a drafted token.",
            rich_help_panel=_GIVEN,
        ),
    ] = None,
    verify_cost: Annotated[
        list[str] | None,
        typer.Option(
            "--verify-cost",
            help="ROWS=COST of a pass in plain passes, may be repeated; flat without it.",
            rich_help_panel=_GIVEN,
        ),
    ] = None,
    decode_share: Annotated[
        float | None,
        typer.Option(
            "--decode-share",
            help="Share of a plain request's time that is decoding.",
            rich_help_panel=_GIVEN,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", "-t", help="Measure this one, as in generate.", rich_help_panel=_MEASURED
        ),
    ] = None,
    drafter: Annotated[
        str,
        typer.Option(
            "--drafter", "-d", help="As in generate; chains only.", rich_help_panel=_MEASURED
        ),
    ] = "ngram",
    rule: o.RuleName = "auto",
    prompts: o.Prompts = "bundled",
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            help="Prompts of each kind; by default 1 of the bundled set, all of a file.",
            rich_help_panel=_MEASURED,
        ),
    ] = None,
    max_tokens: o.MaxTokens = 64,
    sampling: dict[str, Any],
    seed: o.Seed = None,
    draft_length: Annotated[
        int | None,
        typer.Option("--draft-length", "-k", help="One of interest, beside the best."),
    ] = None,
    longest: Annotated[int, typer.Option("--longest", help="Longest draft to look at.")] = 20,
    params: Annotated[
        str | None,
        typer.Option("--params", help="Of the target, such as 7B.", rich_help_panel=_SIZES),
    ] = None,
    draft_params: Annotated[
        str | None,
        typer.Option("--draft-params", help="Of the draft model.", rich_help_panel=_SIZES),
    ] = None,
    bytes_per_weight: Annotated[
        float,
        typer.Option("--bytes-per-weight", help="2 for bfloat16.", rich_help_panel=_SIZES),
    ] = 2.0,
    kv_bytes: Annotated[
        float | None,
        typer.Option(
            "--kv-bytes-per-token",
            help="Of the target: 2 · layers · key heads · width · bytes.",
            rich_help_panel=_SIZES,
        ),
    ] = None,
    draft_kv_bytes: Annotated[
        float | None,
        typer.Option(
            "--draft-kv-bytes-per-token", help="Of the draft model.", rich_help_panel=_SIZES
        ),
    ] = None,
    context: Annotated[
        int,
        typer.Option("--context", help="Tokens of each sequence.", rich_help_panel=_SIZES),
    ] = 2048,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            "--batch", help="Sequences side by side, may be repeated.", rich_help_panel=_SIZES
        ),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            "--bandwidth-gbs",
            help="Of the memory with the weights, GB/s.",
            rich_help_panel=_SIZES,
        ),
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(
            "--tflops", help="Of arithmetic, 10^12 operations a second.", rich_help_panel=_SIZES
        ),
    ] = None,
    runtime: o.Runtime = "auto",
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    page: Annotated[Path | None, typer.Option("--html", help="Write a page with pictures.")] = None,
    as_json: o.AsJson = False,
) -> None:
    """Say what speculation can be expected to gain, and with how long a draft.

    From an acceptance rate and a cost ratio (--alpha 0.8 --cost-ratio 8), or from what is measured
    on this machine (--target T --drafter D): then theory stands beside measurement.
    """
    from outrider.cli.screen import Screen
    from outrider.lab.plan import BATCHES, Acceptance, make_plan

    _check_source(alpha, cost_ratio, target, verify_cost)
    if page is not None:
        import outrider.report.plan  # noqa: F401, tells a missing jinja2 or matplotlib

        check_place(page)
    screen = Screen()
    sizes = _sides(params, draft_params, bytes_per_weight, kv_bytes, draft_kv_bytes)
    common: dict[str, Any] = {
        "longest": longest,
        "chosen": draft_length,
        "decode_share": decode_share,
        "machine": _machine(bandwidth, tflops, params),
        "context_tokens": context,
        "batches": sorted(set(batch or BATCHES)),
    }
    if alpha is not None:
        cost = _inverse(cost_ratio)
        made = make_plan(
            Acceptance(alpha), cost, price=_price(verify_cost), target=sizes[0], draft=sizes[1],
            **common,
        )  # fmt: skip
    else:
        made = _measure(
            screen, target or "", drafter, rule, prompts, limit, sizes, common,
            {"max_tokens": max_tokens, **sampling, "seed": seed or 0},
            {"runtime": runtime, "dtype": dtype, "device": device},
        )  # fmt: skip
    told = _told(made)
    if page is not None:
        from outrider.report.page import write_page
        from outrider.report.plan import plan_page

        write_page(page, plan_page(made, command=shlex.join(["outrider", *sys.argv[1:]])))
    if as_json:
        typer.echo(json.dumps(told, ensure_ascii=False))
        return
    from outrider.cli.plan_table import show

    show(screen, made)
    if page is not None:
        screen.err.print(f"The page is in {page}.", markup=False)


def _told(made: Plan) -> dict[str, Any]:
    from outrider.lab.plan_wording import assumptions, headline, sentences

    words = {"headline": headline(made), "sentences": sentences(made)}
    return made.to_dict() | words | {"assumptions": assumptions(made)}


def _check_source(
    alpha: float | None, cost_ratio: float | None, target: str | None, verify: list[str] | None
) -> None:
    if (alpha is None) == (target is None):
        got = "neither" if alpha is None else "both"
        raise UsageError(
            f"Either --alpha or --target is needed; got {got}.",
            hint="Example: outrider plan --alpha 0.8 --cost-ratio 8",
        )
    if target is not None and (cost_ratio is not None or verify):
        raise UsageError(
            "--cost-ratio and --verify-cost go with --alpha; with --target they are measured.",
            hint="Leave them out.",
        )


def _inverse(ratio: float | None) -> float | None:
    if ratio is None:
        return None
    if not 0 < ratio < float("inf"):
        raise UsageError(
            f"--cost-ratio must be above 0; got {ratio:g}.",
            hint="It is the time of a pass of the target over that of a drafted token.",
        )
    return 1 / ratio


def _price(pairs: list[str] | None) -> Price | None:
    """From ``["8=1.7"]`` to a price of rows, where one row costs 1."""
    from outrider.core.price import Price

    costs = {1: 1.0}
    for pair in pairs or ():
        rows, _, cost = pair.partition("=")
        try:
            n, value = int(rows), float(cost)
        except ValueError:
            n, value = 0, 0.0
        if n < 2 or not 1 <= value < float("inf"):
            raise UsageError(
                f"--verify-cost is ROWS=COST with 2 rows or more and a cost of 1 or more; got "
                f"'{pair}'.",
                hint="Example: --verify-cost 8=1.7",
            )
        if n in costs:
            raise UsageError(
                f"--verify-cost names {n} rows twice.", hint="Give each number of rows once."
            )
        costs[n] = value
    in_order = [costs[n] for n in sorted(costs)]
    if in_order != sorted(in_order):
        raise UsageError(
            f"More rows never cost less than fewer; --verify-cost says {', '.join(pairs or ())}.",
            hint="Example: --verify-cost 4=1.2 --verify-cost 8=1.7",
        )
    return Price.measured(costs) if len(costs) > 1 else None


def _number(text: str | None, option: str) -> float | None:
    """``7B`` as 7e9."""
    if text is None:
        return None
    factor = _SUFFIXES.get(text[-1:].lower(), 0.0)
    try:
        value = float(text[:-1]) * factor if factor else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError(
            f"{option} is a number of parameters; got '{text}'.", hint=f"Example: {option} 7B"
        )
    return value


def _sides(
    params: str | None,
    draft_params: str | None,
    bytes_per_weight: float,
    kv: float | None,
    draft_kv: float | None,
) -> tuple[Side, Side]:
    from outrider.lab.plan import Side

    if not 0 < bytes_per_weight < float("inf"):
        raise UsageError(f"--bytes-per-weight must be above 0; got {bytes_per_weight:g}.")
    counts = _number(params, "--params"), _number(draft_params, "--draft-params")
    return tuple(  # type: ignore[return-value]
        Side(count, None if count is None else count * bytes_per_weight, cache)
        for count, cache in zip(counts, (kv, draft_kv), strict=True)
    )


def _machine(bandwidth: float | None, tflops: float | None, params: str | None) -> Machine | None:
    from outrider.lab.plan import Machine

    given = {"--bandwidth-gbs": bandwidth, "--tflops": tflops, "--params": params}
    if bandwidth is None and tflops is None:
        return None
    if missing := [name for name, value in given.items() if value is None]:
        raise UsageError(
            f"--bandwidth-gbs, --tflops and --params go together; {missing[0]} is missing.",
            hint="Example: --bandwidth-gbs 900 --tflops 120 --params 7B",
        )
    assert bandwidth is not None
    assert tflops is not None
    return Machine(1e9 * bandwidth, 1e12 * tflops)


def _measure(
    screen: Screen,
    target: str,
    drafter: str,
    rule: str,
    prompts: str,
    limit: int | None,
    sizes: tuple[Side, Side],
    common: dict[str, Any],
    request: dict[str, Any],
    load: dict[str, Any],
) -> Plan:
    """Load, measure, plan, and measure what was planned."""
    from outrider.cli.generate import chat_or_text, check_request
    from outrider.cli.screen import load_engine
    from outrider.engine.prompts import BUNDLED, read_prompts
    from outrider.lab.plan import make_plan
    from outrider.lab.probe import check_draft, probe, run_beside_plain

    # What is wrong is told before a model is loaded for it.
    check_request(request)
    each = 1 if limit is None and prompts == BUNDLED else limit
    records = read_prompts(prompts, limit=each)
    engine = load_engine(
        screen, target, drafter=drafter, rule=rule, temperature=request["temperature"], **load
    )
    check_draft(engine)
    asked = [
        chat_or_text(engine, r.prompt) if isinstance(r.prompt, str) else r.prompt for r in records
    ]
    on = screen.err.is_terminal
    with screen.err.status("measuring ...") if on else nullcontext() as status:

        def progress(what: str) -> Any:
            def tell(done: int, total: int) -> None:
                if status is not None:
                    status.update(f"{what}: {done} of {total} prompts")

            return tell

        longest = common["longest"]
        found = probe(engine, asked, longest=longest, progress=progress("drafting"), **request)
        about = {
            "target": target,
            "drafter": engine.drafter.name if drafter == "auto" else drafter,
            "prompts": len(asked),
            "max_tokens": request["max_tokens"],
            "temperature": request["temperature"],
            "draft_step_ms": 1e3 * found.draft_s,
            "pass_ms": {str(n): 1e3 * s for n, s in found.pass_s.items()},
            "trials_by_depth": found.depths.reached,
        }
        # Sizes that are given take the place of what shows.
        sides = [
            _known(given, seen)
            for given, seen in zip(sizes, (found.target, found.draft), strict=True)
        ]
        common |= {"price": found.price, "target": sides[0], "draft": sides[1], "about": about}
        first = make_plan(found.acceptance, **found.costs, **common)
        length = first.best.draft_length or 1
        measured, share = run_beside_plain(
            engine, asked, length, progress=progress("in turns with plain decoding"), **request
        )
    if common["decode_share"] is None:
        common["decode_share"] = share
    return make_plan(found.acceptance, **found.costs, measured=measured, **common)


def _known(given: Side, seen: Side) -> Side:
    from dataclasses import fields

    from outrider.lab.plan import Side

    names = [f.name for f in fields(Side)]
    values = {n: getattr(given, n) or getattr(seen, n) for n in names}
    return Side(**values)

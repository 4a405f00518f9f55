"""``outrider drafts exits``: does a model draft for itself, and with which of its layers?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import options as o

if TYPE_CHECKING:
    from outrider.engine.exits import Exit

__all__ = ["exits"]


def exits(
    target: Annotated[str, typer.Argument(help="As for --target.")],
    prompts: Annotated[
        str, typer.Option(help="How many of the bundled prompts, or a .txt or .jsonl file.")
    ] = "4",
    max_tokens: o.MaxTokens = 64,
    longest: Annotated[int, typer.Option(min=1, help="Most tokens in a draft.")] = 8,
    tried: Annotated[int, typer.Option("--exits", min=0, help="How many exits to try.")] = 6,
    subsets: Annotated[bool, typer.Option(help="Leave layers out in between, too.")] = True,
    adapter: o.Adapter = None,
    adapter_mode: o.AdapterMode = "merged",
    runtime: o.Runtime = "auto",
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    as_json: o.AsJson = False,
) -> None:
    """Find the early exit or the layers that draft best for a model, by measured time.

    The model answers some prompts; its first layers, and choices of its layers, then guess these
    answers. The most promising are run in turns with plain decoding. Where none is faster, plain
    decoding is what is recommended.
    """
    from outrider.cli.generate import chat_or_text
    from outrider.cli.screen import Screen, load_engine
    from outrider.engine.exits import best_exits, drafter_of
    from outrider.train.run import read_prompts

    asked = read_prompts(int(prompts) if prompts.isdecimal() else prompts)
    screen = Screen()
    engine = load_engine(
        screen, target, drafter="none", adapter=adapter, adapter_mode=adapter_mode,
        runtime=runtime, dtype=dtype, device=device,
    )  # fmt: skip
    texts = [chat_or_text(engine, p) if isinstance(p, str) else p for p in asked]
    with screen.err.status("trying layers ...") as status:
        found = best_exits(
            engine,
            texts,
            max_tokens=max_tokens,
            longest=longest,
            exits=tried,
            subsets=subsets,
            progress=lambda done, total: status.update(f"trying layers: {done} of {total}"),
        )
    best = drafter_of(found)
    if as_json:
        result = {"target": target, "best": best, "exits": [one.to_dict() for one in found]}
        typer.echo(json.dumps(result))
        return
    _show(found)
    if best == "none":
        typer.echo("plain: none of these layers drafts fast enough to pay. Use --drafter none.")
    else:
        typer.echo(f"Use --drafter {best} --draft-length {found[0].draft_length}.")


def _show(found: list[Exit]) -> None:
    from rich.table import Table

    from outrider.cli.screen import console

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("drafter", overflow="fold")
    for column in ("kept", "length", "tokens/call", "step/verify", "tokens/s", "plain", "speed"):
        table.add_column(column, justify="right")
    for one in found:
        plain = 1e3 / one.plain_ms
        measured = one.measured_speedup
        table.add_row(
            one.drafter,
            f"{one.acceptance_rate:.0%}",
            f"{one.draft_length}",
            f"{one.tokens_per_target_call:.2f}",
            f"{one.draft_step_ms / one.verify_ms:.2f}",
            f"{one.predicted_speedup * plain:.1f}",
            f"{plain:.1f}",
            f"{one.predicted_speedup:.2f} predicted"
            if measured is None
            else f"{measured:.2f} measured",
        )
    console().print(table)

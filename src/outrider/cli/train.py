"""``outrider train``: a draft fitted to its target."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from outrider.cli import options as o

_USELESS = 1.05
"""Tokens a call below which a draft is not worth its time anywhere."""

app = typer.Typer(add_completion=False)


@app.command()
def train(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the draft.")],
    method: Annotated[
        str, typer.Option(help="eagle or medusa for a head, distill for a small model.")
    ] = "eagle",
    target: o.TargetName = "smollm2-135m",
    adapter: o.Adapter = None,
    start: Annotated[
        str | None,
        typer.Option(help="Begin from a head: its folder, or shipped. Its sizes stay."),
    ] = None,
    student: Annotated[
        str | None,
        typer.Option(help="For distill, the model to begin from, with the target's tokenizer."),
    ] = None,
    student_layers: Annotated[
        int | None,
        typer.Option(help="For distill, how many of the target's layers to begin with (a fifth)."),
    ] = None,
    prompts: Annotated[
        str,
        typer.Option(
            help="How many of the bundled prompts, own:N that the target writes, a file; or a,b."
        ),
    ] = "2600",
    data: Annotated[
        Path | None, typer.Option(help="Folder for training data (default: OUT/data).")
    ] = None,
    max_answer: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 160,
    draft_vocab: Annotated[
        int, typer.Option(help="Tokens that a head can propose: the most frequent ones.")
    ] = 8192,
    epochs: Annotated[float, typer.Option(help="Passes over the data.")] = 5.0,
    unrolled: Annotated[
        int, typer.Option(help="Steps that a head is trained through and a draft is judged at.")
    ] = 3,
    rate: Annotated[
        float | None, typer.Option(help="Highest learning rate (0.001; distill 0.0003).")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens of the prompt fed before an answer (32; distill 256)."),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(min=2, help="Longest stretch of a text fed at once (256; distill 512)."),
    ] = None,
    tv_weight: Annotated[
        float,
        typer.Option(min=0, help="For distill, weight of the total variation beside the KL."),
    ] = 1.0,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a batch, about.")] = 2048,
    seed: Annotated[int, typer.Option(help="Of data, batches and first weights.")] = 0,
    products: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(help="bfloat16 is twice as fast where the processor multiplies it."),
    ] = "float32",
    max_gigabytes: Annotated[float, typer.Option(help="Most room for training data.")] = 8.0,
    minutes: Annotated[
        float | None, typer.Option(help="Stop fitting after so long; the same command goes on.")
    ] = None,
    dtype: o.Dtype = "auto",
    as_json: o.AsJson = False,
) -> None:
    """Have the target answer prompts, and fit a draft to its answers.

    Everything goes into one folder. A run that was broken off, by Ctrl-C or a power cut, goes on
    where it stopped when the same command is given again. A head is used by --drafter METHOD:OUT,
    a model by --drafter model:OUT.
    """
    from outrider.cli.screen import Screen, load_engine
    from outrider.train.methods import find_method
    from outrider.train.run import Recipe, train_draft

    kind = find_method(method)
    given: dict[str, Any] = {"rate": rate, "context": context, "window": window}
    options = replace(
        kind.defaults, epochs=epochs, unrolled=unrolled, batch_tokens=batch_tokens, seed=seed,
        variation=tv_weight, products=products,
        **{name: value for name, value in given.items() if value is not None},
    )  # fmt: skip
    source: int | str = int(prompts) if prompts.isdecimal() else prompts
    recipe = Recipe(
        method, source, max_answer, draft_vocab, options, start, student, student_layers
    )
    screen = Screen()
    engine = load_engine(
        screen, target, drafter="none", adapter=adapter, dtype=dtype, runtime="native",
        device="cpu",
    )  # fmt: skip
    found = train_draft(
        engine, recipe, out, data=data, max_bytes=int(max_gigabytes * 2**30),
        told_data=_data_line(screen), told=_step_line(screen),
        deadline_s=float("inf") if minutes is None else 60 * minutes,
    )  # fmt: skip
    if as_json:
        rates = {"tokens_per_call": found.tokens_per_call, "tree": found.tree_tokens_per_call}
        typer.echo(json.dumps({"folder": str(out), "validation": asdict(found) | rates}))
        return
    screen.out.print(
        f"Expected on held-out answers, greedy: {found.tokens_per_call:.2f} tokens a target call "
        f"as a chain of {len(found.greedy)}, {found.tree_tokens_per_call:.2f} as a tree with four "
        f"siblings everywhere. Use it: outrider generate --target {target}"
        f"{f' --adapter {adapter}' if adapter else ''} --drafter {kind.drafter}:{out}"
    )
    if found.tokens_per_call < _USELESS:
        screen.out.print(
            "That is no better than plain decoding: fit it for longer (--epochs), to more prompts."
        )


def _data_line(screen: Any) -> Any:
    """A line for every hundredth of the prompts."""

    def told(done: int, total: int) -> None:
        if done % max(1, total // 100) == 0 or done == total:
            screen.err.print(f"answered {done} of {total} prompts")

    return told


def _step_line(screen: Any) -> Any:
    def told(progress: Any) -> None:
        v = progress.validation
        screen.err.print(
            f"step {progress.step} of {progress.steps}: loss {progress.loss:.3f}, "
            f"{progress.tokens_per_s:.0f} tokens/s; held out: acceptance "
            f"{' '.join(f'{a:.2f}' for a in v.acceptance)}, greedy "
            f"{' '.join(f'{a:.2f}' for a in v.greedy)}, {v.tokens_per_call:.2f} tokens a call "
            f"({v.tree_tokens_per_call:.2f} as a tree)"
        )

    return told

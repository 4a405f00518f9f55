"""``outrider chat``: a conversation whose earlier turns stay in the cache."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from outrider.cli import options as o
from outrider.errors import OutriderError, PromptError
from outrider.lab.configuration import parse_length

app = typer.Typer()

_HELP = "/reset forgets the conversation, /quit leaves; Ctrl-C breaks off an answer."


@app.command()
@o.sampling_options()
def chat(
    *,
    target: o.TargetName = "smollm2-135m",
    adapter: o.Adapter = None,
    adapter_mode: o.AdapterMode = "merged",
    drafter: o.DrafterName = "auto",
    strict: o.Strict = False,
    rule: o.RuleName = "auto",
    draft_length: o.DraftLength = "auto",
    max_tokens: o.MaxTokens = 512,
    sampling: dict[str, Any],
    seed: o.Seed = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    runtime: o.Runtime = "auto",
    dtype: o.Dtype = "auto",
    device: o.Device = None,
) -> None:
    """Talk with a model. Each answer only reads what is new since the last one."""
    from outrider.cli.generate import check_request
    from outrider.cli.screen import Screen, load_engine, prefill_bar

    request: dict[str, Any] = {"max_tokens": max_tokens, **sampling}
    check_request(request)
    screen = Screen()
    engine = load_engine(
        screen,
        target,
        drafter=drafter,
        rule=rule,
        draft_length=parse_length(draft_length),
        runtime=runtime,
        dtype=dtype,
        device=device,
        adapter=adapter,
        adapter_mode=adapter_mode,
        strict=strict,
        temperature=sampling["temperature"],
    )
    if not engine.tokenizer.has_chat_template:
        raise PromptError(
            f"'{target}' has no chat template, so it cannot hold a conversation.",
            hint="Use an instruction-tuned model, or `outrider generate` to continue a text.",
        )
    talk = engine.conversation(system)
    screen.err.print(f"[dim]{_HELP}[/]")
    screen.legend()
    while (line := _ask(screen)) is not None:
        if line == "/quit":
            break
        if line == "/reset":
            talk = engine.conversation(system)
            screen.err.print("[dim]forgotten[/]")
            continue
        if line.startswith("/"):
            screen.err.print(f"[dim]{_HELP}[/]")
            continue
        try:
            with prefill_bar(screen) as progress:
                screen.stream(talk.say(line, seed=seed, progress=progress, **request))
        except KeyboardInterrupt:
            screen.out.print()
            screen.err.print("[dim]broken off; the conversation is as it was before[/]")
            continue
        except OutriderError as error:
            # One request failed; the conversation goes on.
            screen.err.print(f"[bold red]error:[/] {error}")
            continue
        screen.summary(talk.last)


def _ask(screen: Any) -> str | None:
    """The next line that is not empty; ``None`` at the end of the input."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            screen.err.print()
            return None
        if line.strip():
            return line.strip()

"""``outrider demo``: where speculation pays and where it does not, on the default model."""

from __future__ import annotations

from typing import Any

import typer

from outrider.cli import options as o

__all__ = ["EDIT", "ORDINARY", "app", "demo"]

app = typer.Typer()

EDIT = """Repeat this Python function exactly, with one change: rename the variable total to result.

def summarize(orders, customers, minimum=0):
    total = 0
    names = []
    for order in orders:
        if order.amount < minimum:
            continue
        total += order.amount
        customer = customers[order.customer_id]
        if customer.name not in names:
            names.append(customer.name)
    average = total / len(orders) if orders else 0
    return {"total": total, "average": average, "names": sorted(names)}
"""
ORDINARY = "Explain in a few sentences why the sky is blue and sunsets are red."


@app.command()
def demo(target: o.TargetName = "smollm2-135m", max_tokens: o.MaxTokens = 160) -> None:
    """Two prompts, each with a draft and without, in turns.

    The first asks for text that mostly repeats its input, where prompt lookup shines. The
    second is an ordinary question, where it seldom finds anything to copy.
    """
    from rich.text import Text

    from outrider.cli.generate import chat_or_text, check_request, take_turns
    from outrider.cli.screen import Screen, load_engine

    request: dict[str, Any] = {"max_tokens": max_tokens}
    check_request(request)
    screen = Screen()
    engine = load_engine(screen, target, drafter="ngram")
    screen.legend()
    for title, prompt in (("An edit", EDIT), ("An ordinary question", ORDINARY)):
        screen.err.rule(f"[bold]{title}[/]", align="left")
        screen.err.print(Text(f"{prompt.strip()}\n", "dim"))
        what: Any = chat_or_text(engine, prompt)
        stream = engine.stream(what, **request)
        screen.stream(stream)
        screen.summary(stream.output)
        screen.err.print("\n[dim]now both ways, three times in turns ...[/]")
        screen.comparison(*take_turns(engine, what, request))
        screen.err.print()

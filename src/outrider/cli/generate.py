"""``outrider generate``: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from outrider.cli import options as o
from outrider.errors import PromptError, UsageError
from outrider.lab.configuration import parse_length

app = typer.Typer()

_TURNS = 3


@app.command()
@o.sampling_options()
def generate(
    *,
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads standard input.")],
    target: o.TargetName = "smollm2-135m",
    adapter: o.Adapter = None,
    adapter_mode: o.AdapterMode = "merged",
    drafter: o.DrafterName = "auto",
    strict: o.Strict = False,
    rule: o.RuleName = "auto",
    draft_length: o.DraftLength = "auto",
    max_tokens: o.MaxTokens = 128,
    sampling: dict[str, Any],
    stop: o.Stop = None,
    stop_token_id: o.StopTokenId = None,
    json_schema: o.JsonSchema = None,
    regex: o.Regex = None,
    seed: o.Seed = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without a drafter.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run plain decoding too, in turns, and show both.")
    ] = False,
    runtime: o.Runtime = "auto",
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    as_json: o.AsJson = False,
) -> None:
    """Generate from a prompt, with a draft running ahead.

    The text streams to standard output. On a terminal, tokens that were drafted and kept,
    tokens that the target repaired and bonus tokens each have a colour.
    """
    from outrider.cli.screen import Screen, load_engine, prefill_bar, speedups

    if plain and compare:
        raise UsageError("--plain and --compare exclude each other.", hint="Leave one out.")
    if prompt == "-":
        prompt = sys.stdin.read().removesuffix("\n")
    if not prompt.strip():
        raise PromptError("The prompt is empty.", hint="Say what to generate from.")
    request: dict[str, Any] = {
        "max_tokens": max_tokens,
        **sampling,
        "stop": stop or (),
        "stop_token_ids": stop_token_id or (),
        "grammar": read_grammar(json_schema, regex),
    }
    length = parse_length(draft_length)
    # A value out of range is told before a model is loaded for it.
    check_request(request)

    screen = Screen()
    engine = load_engine(
        screen,
        target,
        drafter="none" if plain else drafter,
        rule=rule,
        draft_length=length,
        runtime=runtime,
        dtype=dtype,
        device=device,
        adapter=adapter,
        adapter_mode=adapter_mode,
        strict=strict,
        temperature=sampling["temperature"],
    )
    what = prompt if raw else chat_or_text(engine, prompt, system)
    with prefill_bar(screen) as progress:
        stream = engine.stream(what, seed=seed, progress=progress, **request)
        if not as_json:
            screen.legend()
            screen.stream(stream)
        output = stream.output
    request["seed"] = output.seed

    outputs: list[Any] = [output]
    plains: list[Any] = []
    if compare:
        outputs, plains = take_turns(engine, what, request)
    if as_json:
        result = {
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "target": target,
            "drafter": output.drafter,
            "rule": output.rule,
            "seed": output.seed,
            "trace": output.trace.summary(),
        }
        if plains:
            result["plain"] = {
                "text": plains[0].text,
                "token_ids": plains[0].token_ids,
                "trace": plains[0].trace.summary(),
            }
            result["speedup"] = median(speedups(outputs, plains))
        typer.echo(json.dumps(result, ensure_ascii=False))
    elif compare:
        screen.comparison(outputs, plains)
    else:
        screen.summary(output)


def check_request(request: dict[str, Any]) -> None:
    """Raise ``SamplingError`` for a value out of its range."""
    from dataclasses import fields

    from outrider.core.processors import Sampling
    from outrider.engine.transcript import Transcript

    names = {f.name for f in fields(Sampling)}
    Sampling(**{name: value for name, value in request.items() if name in names})
    Transcript(None, max_tokens=request["max_tokens"], eos_token_ids=frozenset())


def read_grammar(json_schema: str | None, regex: str | None) -> Any:
    """What the answer may be; ``None``: anything.

    Raises
    ------
    UsageError
        When both are given, or the schema's file cannot be read or is no JSON object.
    """
    from outrider.engine.grammar import Grammar

    if json_schema is not None and regex is not None:
        raise UsageError("--json-schema and --regex exclude each other.", hint="Leave one out.")
    if regex is not None:
        return Grammar.regex(regex)
    if json_schema is None:
        return None
    if not json_schema.lstrip().startswith("{"):
        try:
            json_schema = Path(json_schema).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"--json-schema is a file or a JSON object; '{json_schema}' cannot be read: "
                f"{error}.",
                hint='Example: --json-schema \'{"type": "object"}\'',
            ) from error
    return Grammar.json_schema(json_schema)


def chat_or_text(engine: Any, prompt: str, system: str | None = None) -> Any:
    """A message where the model has a chat template, the bare text where it has none."""
    if not engine.tokenizer.has_chat_template:
        return prompt
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": prompt}]


def take_turns(engine: Any, prompt: Any, request: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Speculation and plain decoding of one prompt, one after the other, three times.

    A drift of the machine's speed so falls on both.
    """
    ours: list[Any] = []
    plains: list[Any] = []
    for turn in range(_TURNS):
        pair = [(ours, False), (plains, True)]
        for outputs, plain in pair if turn % 2 else pair[::-1]:
            outputs.append(engine.generate(prompt, plain=plain, **request))
    return ours, plains

"""Options that several subcommands share, spelt once."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from outrider.errors import UsageError
from outrider.registry import POLICIES

__all__ = [
    "AsJson", "Device", "DraftLength", "DrafterName", "Dtype", "FrequencyPenalty", "LogitBias",
    "MaxTokens", "MinP", "MinTokens", "PresencePenalty", "RepetitionPenalty", "RuleName",
    "Runtime", "Seed", "Stop", "StopTokenId", "TargetName", "Temperature", "TopK", "TopP",
    "parse_draft_length", "parse_logit_bias",
]  # fmt: skip

_SAMPLING = "Sampling"
_MODEL = "Model"
_SPECULATION = "Speculation"

TargetName = Annotated[
    str,
    typer.Option(
        "--target",
        "-t",
        help="Catalogue name, .gguf file, transformers folder, hub id or toy.",
        rich_help_panel=_MODEL,
    ),
]
Runtime = Annotated[str, typer.Option("--runtime", help="auto, hf or toy.", rich_help_panel=_MODEL)]
Dtype = Annotated[
    str,
    typer.Option("--dtype", help="auto, float32, bfloat16 or float16.", rich_help_panel=_MODEL),
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda, cuda:1, ...", rich_help_panel=_MODEL),
]
DrafterName = Annotated[
    str,
    typer.Option(
        "--drafter",
        "-d",
        help="auto, none, ngram or model:PATH.",
        rich_help_panel=_SPECULATION,
    ),
]
RuleName = Annotated[
    str,
    typer.Option(
        "--rule",
        "-r",
        help="auto (greedy at temperature 0, else coupled), greedy, rejection, block or coupled.",
        rich_help_panel=_SPECULATION,
    ),
]
DraftLength = Annotated[
    str,
    typer.Option(
        "--draft-length",
        "-k",
        help="Tokens drafted in a round: a number, auto, or adaptive[:MOST].",
        rich_help_panel=_SPECULATION,
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to emit.")]
Temperature = Annotated[
    float,
    typer.Option("--temperature", help="0 is greedy.", rich_help_panel=_SAMPLING),
]
TopK = Annotated[
    int, typer.Option("--top-k", help="0 keeps all tokens.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float, typer.Option("--top-p", help="1 keeps all tokens.", rich_help_panel=_SAMPLING)
]
MinP = Annotated[
    float, typer.Option("--min-p", help="0 keeps all tokens.", rich_help_panel=_SAMPLING)
]
RepetitionPenalty = Annotated[
    float,
    typer.Option("--repetition-penalty", help="1 changes nothing.", rich_help_panel=_SAMPLING),
]
PresencePenalty = Annotated[
    float,
    typer.Option("--presence-penalty", help="0 changes nothing.", rich_help_panel=_SAMPLING),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option("--frequency-penalty", help="0 changes nothing.", rich_help_panel=_SAMPLING),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option("--logit-bias", help="ID:BIAS, may be repeated.", rich_help_panel=_SAMPLING),
]
MinTokens = Annotated[
    int,
    typer.Option("--min-tokens", help="No end token before so many.", rich_help_panel=_SAMPLING),
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="A string to stop at, may be repeated.")
]
StopTokenId = Annotated[
    list[int] | None, typer.Option("--stop-token-id", help="A token to stop at, may be repeated.")
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="The same seed gives the same text.", rich_help_panel=_SAMPLING),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def parse_draft_length(text: str) -> Any:
    """A number, ``auto``, or a policy's name.

    Raises
    ------
    UsageError
        When it is none of these.
    """
    if text.isdecimal():
        return int(text)
    name = text.partition(":")[0]
    if text != "auto" and name not in POLICIES:
        raise UsageError(
            f"--draft-length is a number, auto or adaptive; got '{text}'.",
            hint="Example: --draft-length 5",
        )
    return text


def parse_logit_bias(pairs: list[str] | None) -> dict[int, float] | None:
    """From ``["42:-1.5"]`` to ``{42: -1.5}``.

    Raises
    ------
    UsageError
        When a pair is not a token id and a number.
    """
    try:
        return {int(i): float(b) for i, b in (pair.split(":") for pair in pairs or [])} or None
    except ValueError as error:
        raise UsageError(
            f"--logit-bias is a token id and a number; got {pairs}.", hint="Example: 42:-1.5"
        ) from error

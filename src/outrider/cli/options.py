"""Options that several subcommands share, spelt once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any

import typer

from outrider.errors import UsageError

__all__ = [
    "Adapter", "AdapterMode", "AsJson", "Device", "DraftLength", "DraftLengths", "DrafterName",
    "DrafterNames", "Dtype", "JsonSchema", "Limit", "MaxTokens", "OnRay", "Prompts", "RayAddress",
    "RayWorkers", "Regex", "RuleName", "RuleNames", "Runtime", "Seed", "Stop", "StopTokenId",
    "Strict", "TargetName", "sampling_options",
]  # fmt: skip

_SAMPLING = "Sampling"
_MODEL = "Model"
_SPECULATION = "Speculation"
_MEASURING = "Measuring"
_RAY = "Cluster"

TargetName = Annotated[
    str,
    typer.Option(
        "--target",
        "-t",
        help="Catalogue name, .gguf file, transformers folder, hub id or toy.",
        rich_help_panel=_MODEL,
    ),
]
Runtime = Annotated[
    str, typer.Option("--runtime", help="auto, native, hf or toy.", rich_help_panel=_MODEL)
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype", help="auto, int4, int8, bfloat16, float16 or float32.", rich_help_panel=_MODEL
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda, cuda:1, ...", rich_help_panel=_MODEL),
]
Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter", help="Folder of a LoRA adapter for the target.", rich_help_panel=_MODEL
    ),
]
AdapterMode = Annotated[
    str,
    typer.Option(
        "--adapter-mode",
        help="merged into the weights, or live beside them (hf runtime).",
        rich_help_panel=_MODEL,
    ),
]
DrafterName = Annotated[
    str,
    typer.Option(
        "--drafter",
        "-d",
        help="auto, none, ngram, suffix, model:PATH, crosstoken:PATH, eagle[:FOLDER], "
        "medusa:FOLDER, early_exit:K, or two with a + between (docs/drafters.md).",
        rich_help_panel=_SPECULATION,
    ),
]
DrafterNames = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter",
        "-d",
        help="As in generate; may be repeated. Each is taken with every --rule and --draft-length.",
        rich_help_panel=_SPECULATION,
    ),
]
RuleNames = Annotated[
    list[str] | None,
    typer.Option(
        "--rule", "-r", help="As in generate; may be repeated.", rich_help_panel=_SPECULATION
    ),
]
DraftLengths = Annotated[
    list[str] | None,
    typer.Option(
        "--draft-length",
        "-k",
        help="As in generate; may be repeated.",
        rich_help_panel=_SPECULATION,
    ),
]
Prompts = Annotated[
    str,
    typer.Option(
        "--prompts",
        help="bundled, a text file with a prompt a line, or .jsonl with prompt, messages or turns.",
        rich_help_panel=_MEASURING,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", help="Prompts of each kind.", rich_help_panel=_MEASURING),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Refuse a draft head that was made for another state of the target.",
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
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="A string to stop at, may be repeated.")
]
JsonSchema = Annotated[
    str | None,
    typer.Option("--json-schema", help="A JSON schema that the answer keeps to: a file, or JSON."),
]
Regex = Annotated[
    str | None, typer.Option("--regex", help="An expression that the whole answer matches.")
]
StopTokenId = Annotated[
    list[int] | None, typer.Option("--stop-token-id", help="A token to stop at, may be repeated.")
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="The same seed gives the same text.", rich_help_panel=_SAMPLING),
]
OnRay = Annotated[
    bool, typer.Option("--ray", help="Spread the work over a Ray cluster.", rich_help_panel=_RAY)
]
RayAddress = Annotated[
    str,
    typer.Option(
        "--ray-address",
        help="auto (the cluster that runs), local (one for this command) or a head node's.",
        rich_help_panel=_RAY,
    ),
]
RayWorkers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        help="Processes with a target each (one for each machine).",
        rich_help_panel=_RAY,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


_SAMPLED: dict[str, tuple[Any, Any, str]] = {
    "temperature": (float, 0.0, "0 is greedy."),
    "top_k": (int, 0, "0 keeps all tokens."),
    "top_p": (float, 1.0, "1 keeps all tokens."),
    "min_p": (float, 0.0, "0 keeps all tokens."),
    "repetition_penalty": (float, 1.0, "1 changes nothing."),
    "presence_penalty": (float, 0.0, "0 changes nothing."),
    "frequency_penalty": (float, 0.0, "0 changes nothing."),
    "logit_bias": (list[str] | None, None, "ID:BIAS, may be repeated."),
    "min_tokens": (int, 0, "No end token before so many."),
}
"""Of each sampling value its type on the command line, its default and its help."""


def sampling_options(
    *, temperature: float | list[float] = 0.0
) -> Callable[[Callable[..., None]], Any]:
    """Give a command one option for each sampling value, gathered in its argument ``sampling``.

    Parameters
    ----------
    temperature
        The command's default; a list for a command that takes several.
    """

    def widen(command: Callable[..., None]) -> Any:
        @wraps(command)
        def run(**values: Any) -> None:
            sampling = {name: values.pop(name) for name in _SAMPLED}
            sampling["logit_bias"] = _parse_logit_bias(sampling["logit_bias"])
            command(**values, sampling=sampling)

        own = signature(command, eval_str=True)
        parameters = []
        for parameter in own.parameters.values():
            if parameter.name != "sampling":
                parameters.append(parameter)
                continue
            for name, (kind, default, words) in _SAMPLED.items():
                if name == "temperature" and isinstance(temperature, list):
                    kind, words = list[float], f"{words[:-1]}; may be repeated."
                option = typer.Option(
                    f"--{name.replace('_', '-')}", help=words, rich_help_panel=_SAMPLING
                )
                parameters.append(
                    Parameter(
                        name,
                        Parameter.KEYWORD_ONLY,
                        default=temperature if name == "temperature" else default,
                        annotation=Annotated[kind, option],
                    )
                )
        parameters = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in parameters]
        # Typer reads a command's options from its signature and its annotations.
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return widen


def _parse_logit_bias(pairs: list[str] | None) -> dict[int, float] | None:
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

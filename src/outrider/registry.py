"""Names for the parts that can be swapped, each resolved only when it is asked for.

A table maps a name to ``"module:attribute"``. Adding a part is one file and one line here;
the contract tests then run over it. Other packages add theirs through the entry-point groups
``outrider.drafters``, ``outrider.rules``, ``outrider.runtimes``, ``outrider.policies``,
``outrider.metrics`` and ``outrider.peers``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from outrider.errors import UnknownNameError, UsageError

__all__ = [
    "DRAFTERS", "METRICS", "PEERS", "POLICIES", "RULES", "RUNTIMES", "Table", "did_you_mean",
    "refuse_argument",
]  # fmt: skip


def did_you_mean(name: str, known: Mapping[str, object] | list[str]) -> str:
    """A closing sentence that names the nearest known spelling, and all of them.

    >>> did_you_mean("ngrma", ["ngram", "none"])
    "Did you mean 'ngram'? Known: ngram, none."
    """
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    guess = f"Did you mean '{close[0]}'? " if close else ""
    return f"{guess}Known: {', '.join(known)}."


def refuse_argument(name: str, argument: str) -> None:
    """Raise ``UsageError`` when a part that takes no argument was given one."""
    if argument:
        raise UsageError(
            f"'{name}' takes no argument; got '{name}:{argument}'.", hint=f"Write '{name}' alone."
        )


class Table(Mapping[str, str]):
    """A table of one kind of part: iterate it for names, ``load`` one to get the object.

    ``also`` are spellings that commands take beside the names; messages list them too.

    >>> RULES.load("greedy").__name__
    'Greedy'
    """

    def __init__(
        self, group: str, kind: str, entries: dict[str, str], also: tuple[str, ...] = ()
    ) -> None:
        self.group = group
        self.kind = kind
        self.also = also
        self._own = entries
        self._all: dict[str, str] | None = None

    def _entries(self) -> dict[str, str]:
        if self._all is None:
            group = entry_points(group=f"outrider.{self.group}")
            # Ours win: an installed package cannot quietly replace a built-in part.
            self._all = {point.name: point.value for point in group} | self._own
        return self._all

    def __getitem__(self, name: str) -> str:
        return self._entries()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries())

    def __len__(self) -> int:
        return len(self._entries())

    def load(self, name: str) -> Any:
        """The object registered under ``name``.

        Raises
        ------
        UnknownNameError
            When nothing has that name; the message offers the nearest one.
        """
        if not isinstance(name, str) or name not in self._entries():
            raise UnknownNameError(
                f"There is no {self.kind} named '{name}'.",
                hint=did_you_mean(str(name), [*self.also, *self]),
            )
        module, _, attribute = self[name].partition(":")
        return getattr(import_module(module), attribute)


DRAFTERS = Table(
    "drafters",
    "drafter",
    {
        "none": "outrider.drafters.none:NoDrafter",
        "ngram": "outrider.drafters.ngram:NgramDrafter",
        "model": "outrider.drafters.model:ModelDrafter",
        "crosstoken": "outrider.drafters.crosstoken:CrossTokenDrafter",
        "eagle": "outrider.drafters.eagle:EagleDrafter",
        "medusa": "outrider.drafters.medusa:MedusaDrafter",
        "early_exit": "outrider.drafters.early_exit:EarlyExitDrafter",
        "script": "outrider.drafters.script:ScriptDrafter",
        "suffix": "outrider.drafters.suffix:SuffixDrafter",
        "mixed": "outrider.drafters.mixed:MixedDrafter",
    },
    also=("auto", "a+b"),
)

RULES = Table(
    "rules",
    "rule",
    {
        "greedy": "outrider.rules.greedy:Greedy",
        "rejection": "outrider.rules.rejection:Rejection",
        "coupled": "outrider.rules.coupled:Coupled",
        "block": "outrider.rules.block:Block",
    },
    also=("auto",),
)

RUNTIMES = Table(
    "runtimes",
    "runtime",
    {
        "toy": "outrider.models.toy:load",
        "hf": "outrider.models.hf:load",
        "native": "outrider.models.native.load:load",
    },
    also=("auto",),
)

POLICIES = Table(
    "policies",
    "policy",
    {
        "fixed": "outrider.policies.fixed:Fixed",
        "adaptive": "outrider.policies.adaptive:Adaptive",
    },
)

METRICS = Table(
    "metrics",
    "metric",
    {
        "acceptance_rate": "outrider.lab.metrics.acceptance_rate:AcceptanceRate",
        "tokens_per_target_call": "outrider.lab.metrics.tokens_per_target_call:TokensPerTargetCall",
        "target_calls_per_token": "outrider.lab.metrics.target_calls_per_token:TargetCallsPerToken",
        "drafted_per_call": "outrider.lab.metrics.drafted_per_call:DraftedPerCall",
        "draft_ms_per_round": "outrider.lab.metrics.draft_ms_per_round:DraftMsPerRound",
        "draft_ms_per_token": "outrider.lab.metrics.draft_ms_per_token:DraftMsPerToken",
        "verify_ms_per_call": "outrider.lab.metrics.verify_ms_per_call:VerifyMsPerCall",
        "tokens_per_s": "outrider.lab.metrics.tokens_per_s:TokensPerS",
        "decode_tokens_per_s": "outrider.lab.metrics.decode_tokens_per_s:DecodeTokensPerS",
        "ttft_ms": "outrider.lab.metrics.ttft_ms:TimeToFirstToken",
        "tpot_ms": "outrider.lab.metrics.tpot_ms:TimePerOutputToken",
        "total_ms": "outrider.lab.metrics.total_ms:TotalMs",
        "draft_share": "outrider.lab.metrics.draft_share:DraftShare",
        "verify_share": "outrider.lab.metrics.verify_share:VerifyShare",
        "other_share": "outrider.lab.metrics.other_share:OtherShare",
    },
)

PEERS = Table(
    "peers",
    "peer",
    {
        "transformers": "outrider.lab.peers.transformers:Transformers",
        "llama.cpp": "outrider.lab.peers.llama_cpp:LlamaCpp",
        "openvino": "outrider.lab.peers.openvino:OpenVino",
        "endpoint": "outrider.lab.peers.endpoint:Endpoint",
    },
)

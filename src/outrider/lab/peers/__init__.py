"""Other programs that decode the same prompts in the same turns, one file a peer.

``PEERS`` in the registry names them. A peer times itself, as close to its decoding as it can be
reached: what it tells is a text, a number of tokens and two times, and no rounds.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

from outrider.core.processors import Sampling
from outrider.engine.engine import Engine
from outrider.engine.loading import load_model
from outrider.errors import UsageError
from outrider.models.hf import HFModel
from outrider.protocols import Model
from outrider.registry import PEERS, did_you_mean

__all__ = [
    "Ask", "Peer", "Reply", "Stage", "changed", "check_peers", "options_of", "parse_peer",
    "running",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ask:
    """What a peer is to answer.

    Parameters
    ----------
    ids
        The prompt as the target's token ids, its chat template applied.
    prompt
        The same before that, a text or messages, for a peer that takes no ids.
    max_tokens
        Most tokens of the answer; the context has room for them.
    temperature, seed
        Of the request.
    ignore_eos
        Go on past end tokens.
    sampling
        Further values of ``core.processors.Sampling``, of those that the peer ``takes``, where
        they change something.
    """

    ids: Sequence[int]
    prompt: str | Sequence[Mapping[str, str]]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of a peer.

    Parameters
    ----------
    text
        The output.
    tokens, counted
        How many tokens it has, and from what that is known.
    ttft_s, total_s
        Seconds to the first token and in all.
    finish_reason
        ``stop`` or ``length``.
    token_ids
        In the target's vocabulary, with the one that ended the output; empty where the peer does
        not tell them all.
    """

    text: str
    tokens: int
    counted: Literal["ids", "usage", "chunks"]
    ttft_s: float
    total_s: float
    finish_reason: str
    token_ids: Sequence[int] = ()


class Stage:
    """What a peer may use of the measurement.

    Parameters
    ----------
    engine
        With the target.
    capacity
        Most tokens of a prompt and its answer together.
    """

    def __init__(self, engine: Engine, capacity: int) -> None:
        self.engine = engine
        self.capacity = capacity

    @cached_property
    def hf(self) -> HFModel:
        """The target as the ``hf`` runtime has it: its own model, or loaded once more.

        Raises
        ------
        UsageError
            When the target has no files to load.
        ModelError
            When they do not fit into memory beside the target, or transformers cannot read them.
        """
        engine = self.engine
        if isinstance(engine.model, HFModel):
            return engine.model
        if engine.located is None or engine.located.kind == "toy":
            raise UsageError(
                f"'{engine.model.name}' is no model that transformers has.",
                hint="Give a target that is a file, a folder or a hub id, or leave --peer out.",
            )
        made = self._load(engine.located)
        assert isinstance(made, HFModel)
        return made

    def hf_draft(self, path: str) -> HFModel:
        """A draft model with the target's tokenizer, in the ``hf`` runtime."""
        from outrider.engine.loading import load_draft

        made = load_draft(path, self.engine.tokenizer, runtime="hf", **self._options())
        assert isinstance(made, HFModel)
        return made

    def _load(self, located: Any) -> Model:
        model, _ = load_model(located, runtime="hf", **self._options())
        return model

    def _options(self) -> dict[str, Any]:
        """The target's device, and its precision where transformers has that."""
        kind = getattr(self.engine.model, "kind", None)
        floats = ("float32", "bfloat16", "float16")
        device = str(getattr(self.engine.model, "device", "cpu"))
        return {"dtype": kind if kind in floats else None, "device": device}


@runtime_checkable
class Peer(Protocol):
    """Another program that decodes.

    ``label``: as it was asked for. ``takes``: names of the sampling values that it applies as
    ``core.processors.Sampling`` says, beside the temperature.
    """

    name: str
    label: str
    takes: frozenset[str]

    @classmethod
    def build(cls, argument: str) -> Peer:
        """Make one from the text after the colon in ``name:argument``, which may be empty.

        Nothing is started yet. Raises ``UsageError`` for what is wrong or not installed.
        """
        ...

    def start(self, stage: Stage) -> None:
        """Load or start what answers."""
        ...

    def about(self) -> dict[str, str]:
        """What its figures depend on, in words: ``version``, ``weights``, ``precision``,
        ``prompts``, ... The same in every run of the same command."""
        ...

    def answer(self, ask: Ask) -> Reply:
        """Decode, and time it. Whatever it raises makes this one answer a failure."""
        ...

    def stop(self) -> None:
        """Let go of what ``start`` took; also after a ``start`` that failed, and twice."""
        ...


def parse_peer(text: str) -> Peer:
    """From ``name`` or ``name:argument``.

    Raises
    ------
    UnknownNameError
        When there is no such peer.
    UsageError
        When the argument is wrong, or what the peer needs is not installed.

    Example
    -------
    >>> parse_peer("transformers:lookup=10").label
    'transformers:lookup=10'
    """
    name, _, argument = text.strip().partition(":")
    peer: Peer = PEERS.load(name).build(argument)
    return peer


def options_of(name: str, argument: str, known: Sequence[str]) -> dict[str, str]:
    """``key=value`` pairs, or keys alone, of a peer's argument.

    A value may hold commas: only a known key parts the text.

    Raises
    ------
    UsageError
        When a key is not known or given twice.

    Example
    -------
    >>> options_of("llama.cpp", "server=/a,b/server,lookup", ["server", "lookup"])
    {'server': '/a,b/server', 'lookup': ''}
    """
    found: dict[str, str] = {}
    key = ""
    for part in argument.split(",") if argument else ():
        word, equals, value = part.partition("=")
        if word.strip() in known:
            key = word.strip()
            if key in found:
                raise UsageError(f"'{key}' is given twice in '{name}:{argument}'.")
            found[key] = value
        elif key and found[key] and not equals:
            found[key] += f",{part}"
        else:
            raise UsageError(
                f"The peer '{name}' has no '{word.strip()}'.",
                hint=did_you_mean(word.strip(), list(known)),
            )
    return found


def check_peers(peers: Sequence[Peer], sampling: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` where a peer would sample otherwise than the target does."""
    for peer in peers:
        for name, value in changed(sampling).items():
            if name not in peer.takes:
                raise UsageError(
                    f"The peer '{peer.label}' has no {name} that is the same as here; got {value}.",
                    hint=f"Leave --{name.replace('_', '-')} or this --peer out.",
                )


def changed(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The values that change something, the temperature left out.

    >>> changed({"top_k": 0, "top_p": 0.9, "logit_bias": {}})
    {'top_p': 0.9}
    """
    plain = Sampling()
    return {
        name: value
        for name, value in sampling.items()
        if name != "temperature" and (value or None) != (getattr(plain, name) or None)
    }


@contextmanager
def running(peers: Sequence[Peer], stage: Stage) -> Iterator[None]:
    """Peers at work; all are stopped in the end, however it comes: an error, Ctrl-C, SIGTERM."""
    with _signals_as_exits(bool(peers)), ExitStack() as stack:
        for peer in peers:
            stack.callback(peer.stop)  # first, since a start may fail halfway
            peer.start(stage)
        yield


@contextmanager
def _signals_as_exits(wanted: bool) -> Iterator[None]:
    """A signal that would end this process at once runs its ``finally`` first."""

    def leave(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    names = [getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP")]
    here = wanted and threading.current_thread() is threading.main_thread()
    ours = [one for one in names if here and one and signal.getsignal(one) is signal.SIG_DFL]
    try:
        for one in ours:
            signal.signal(one, leave)
        yield
    finally:
        for one in ours:
            signal.signal(one, signal.SIG_DFL)

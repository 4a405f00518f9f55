"""Answers in the protocol's form, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.core.trace import Round, Trace
from outrider.engine.generation import Piece
from outrider.serve.logprobs import TokenLogprobs, Words, for_chat, for_completion
from outrider.serve.scheduler import Done, Tokens
from outrider.serve.tools import Calls, Reader

__all__ = ["Answer"]


class Answer:
    """The answer to one request, as it grows.

    Parameters
    ----------
    id, model, created, fingerprint
        What every chunk names.
    chat
        Whether it is a chat's.
    prompt_lengths
        Tokens of each prompt.
    n
        Outputs to each prompt.
    words
        What tokens read as, for logprobs.
    calls
        The tools that may be called; ``None``: none.

    Where the protocol has no place for it, an object ``outrider`` says what was drafted, kept and
    repaired: in a whole answer and in the last chunk of all for the request, in each choice for
    that output, and in each chunk where its tokens came from and what the round drafted.
    """

    def __init__(
        self,
        *,
        id: str,
        model: str,
        created: int,
        fingerprint: str,
        chat: bool,
        prompt_lengths: Sequence[int],
        n: int,
        words: Words | None,
        calls: Calls | None = None,
    ) -> None:
        self._chat, self._words, self._prompt_tokens = chat, words, sum(prompt_lengths)
        kind = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": id,
            "object": kind,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        count = n * len(prompt_lengths)
        self._pieces: list[list[Piece]] = [[] for _ in range(count)]
        self._logprobs: list[list[TokenLogprobs] | None] = [None] * count
        self._letters = [0] * count  # told in chunks, by the tokens' own texts
        self._done: dict[int, Done] = {}
        self._readers = [calls.reader() for _ in range(count)] if calls else None
        self._told = [(0, 0)] * count  # letters and calls of each that were told in chunks

    @property
    def count(self) -> int:
        """Number of outputs."""
        return len(self._pieces)

    def add(self, index: int, event: Tokens | Done) -> None:
        """Note what came."""
        reader = self._readers[index] if self._readers else None
        if isinstance(event, Done):
            self._done[index] = event
            if reader:
                reader.finish()
            return
        self._pieces[index] += event.pieces
        if reader:
            for piece in event.pieces:
                reader.push(piece.text, piece.token_id)
        if event.logprobs is not None:
            self._logprobs[index] = [*(self._logprobs[index] or []), *event.logprobs]

    def whole(self) -> dict[str, Any]:
        """The answer, once all outputs have come to their ends."""
        choices = []
        for index in range(self.count):
            done, output = self._done[index], self._done[index].output
            choice: dict[str, Any] = {
                "index": index,
                "finish_reason": self._finish_reason(index),
                "logprobs": self._told_logprobs(self._logprobs[index]),
                "outrider": self._about(done) | {"tokens": _tokens(self._pieces[index])},
            }
            if self._chat:
                said = _said(self._readers[index]) if self._readers else {"content": output.text}
                choice["message"] = {"role": "assistant", "refusal": None, **said}
            else:
                choice["text"] = output.text
            choices.append(choice)
        return self._head | {
            "choices": choices,
            "usage": self.usage(),
            "outrider": self.summary(),
        }

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """Who speaks; nothing in a plain completion."""
        delta = {"role": "assistant", "content": None if self._readers else "", "refusal": None}
        return self._chunk(index, {"delta": delta}) if self._chat else None

    def chunk(self, index: int, event: Tokens) -> dict[str, Any]:
        """What one round emitted."""
        text = "".join(piece.text for piece in event.pieces)
        found = self._told_logprobs(event.logprobs, self._letters[index])
        if self._words is not None and event.logprobs is not None:
            self._letters[index] += sum(
                len(self._words.text(one.token_id)) for one in event.logprobs
            )
        delta = self._news(index) if self._readers else {"content": text}
        said: dict[str, Any] = {"delta": delta} if self._chat else {"text": text}
        ours = {"tokens": _tokens(event.pieces), "round": _counts(event.round)}
        return self._chunk(index, said | {"logprobs": found, "outrider": ours})

    def last_chunk(self, index: int, event: Done) -> dict[str, Any]:
        """Why an output ended, and what it cost."""
        said: dict[str, Any] = {"delta": self._news(index)} if self._chat else {"text": ""}
        reason = self._finish_reason(index)
        return self._chunk(index, said | {"finish_reason": reason, "outrider": self._about(event)})

    def usage_chunk(self) -> dict[str, Any]:
        """The counts, after all else."""
        told = {"choices": [], "usage": self.usage(), "outrider": self.summary()}
        return self._head | {"object": self._chunk_kind} | told

    def _news(self, index: int) -> dict[str, Any]:
        """With tools, what is known to be text by now, and calls that are whole."""
        if not self._readers:
            return {}
        reader, (letters, calls) = self._readers[index], self._told[index]
        self._told[index] = len(reader.content), len(reader.calls)
        text, new = reader.content[letters:], list(enumerate(reader.calls))[calls:]
        said: dict[str, Any] = {"content": text} if text else {}
        return said | ({"tool_calls": [{"index": i, **call} for i, call in new]} if new else {})

    def _finish_reason(self, index: int) -> str:
        reason = self._done[index].output.finish_reason
        called = self._readers is not None and bool(self._readers[index].calls)
        return "tool_calls" if called and reason == "stop" else reason

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _chunk(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        full = {"index": index, "finish_reason": None, "logprobs": None} | choice
        return self._head | {"object": self._chunk_kind, "choices": [full]}

    def usage(self) -> dict[str, Any]:
        """Tokens fed and emitted, with those that ended an output."""
        emitted = sum(len(pieces) for pieces in self._pieces)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": emitted,
            "total_tokens": self._prompt_tokens + emitted,
        }

    def summary(self) -> dict[str, Any]:
        """All outputs' rounds together."""
        outputs = [done.output for done in self._done.values()]
        traces = [output.trace for output in outputs]
        firsts = [trace.ttft_s for trace in traces if trace.ttft_s is not None]
        together = Trace(
            prompt_tokens=sum(trace.prompt_tokens for trace in traces),
            prefill_s=sum(trace.prefill_s for trace in traces),
            ttft_s=min(firsts, default=None),
            total_s=sum(trace.total_s for trace in traces),
            rounds=[round for trace in traces for round in trace.rounds],
        )
        return {
            "drafter": outputs[0].drafter if outputs else None,
            "rule": outputs[0].rule if outputs else None,
            "seed": outputs[0].seed if outputs else None,
            "trace": together.summary(),
        }

    def _about(self, done: Done) -> dict[str, Any]:
        return {
            "drafter": done.output.drafter,
            "rule": done.output.rule,
            "drafter_failed": done.drafter_failed,
            "trace": done.output.trace.summary(),
        }

    def _told_logprobs(
        self, found: Sequence[TokenLogprobs] | None, offset: int = 0
    ) -> dict[str, Any] | None:
        if found is None or self._words is None:
            return None
        if self._chat:
            return for_chat(found, self._words)
        return for_completion(found, self._words, offset)


def _said(reader: Reader) -> dict[str, Any]:
    """Text and calls of a whole answer."""
    if not reader.calls:
        return {"content": reader.content}
    return {"content": reader.content or None, "tool_calls": reader.calls}


def _tokens(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    return [{"id": p.token_id, "text": p.text, "origin": p.origin} for p in pieces]


def _counts(round: Round) -> dict[str, int]:
    names = ("drafted", "accepted", "corrections", "bonuses")
    return {name: getattr(round, name) for name in names}

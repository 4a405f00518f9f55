"""transformers' own ``generate`` on the target's weights, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from outrider.errors import UsageError
from outrider.lab.peers import Ask, Reply, Stage, options_of
from outrider.models import attention
from outrider.models.hf import HFModel, quiet

__all__ = ["Transformers"]

_OWN_ATTENTION = "sdpa"


class Transformers:
    """Plain ``generate``, its assisted generation, or its prompt lookup.

    Parameters
    ----------
    assisted
        A draft model with the target's tokenizer, by name or path.
    lookup
        Tokens that prompt lookup drafts at most.

    It runs with transformers' own attention, also where the target is run with ours. Where the
    target has no module of transformers, the ``hf`` runtime loads its files once more.

    Example
    -------
    >>> Transformers.build("assisted=a/folder").label
    'transformers:assisted=a/folder'
    """

    name = "transformers"
    takes = frozenset({"top_k", "top_p", "min_p", "repetition_penalty"})

    def __init__(self, *, assisted: str = "", lookup: int = 0) -> None:
        self.label = self.name
        if assisted:
            self.label += f":assisted={assisted}"
        if lookup:
            self.label += f":lookup={lookup}"
        self._assisted, self._lookup = assisted, lookup
        self._stage: Stage | None = None
        self._model: HFModel | None = None
        self._draft: HFModel | None = None

    @classmethod
    def build(cls, argument: str) -> Transformers:
        """``assisted=PATH``, ``lookup=N``, or nothing."""
        found = options_of(cls.name, argument, ["assisted", "lookup"])
        lookup = found.get("lookup", "0")
        given = "lookup" in found and not (lookup.isdecimal() and int(lookup))
        if given or found.get("assisted") == "" or len(found) > 1:
            raise UsageError(
                f"'{cls.name}' takes assisted=PATH or lookup=N with N from 1; got '{argument}'.",
                hint=f"Example: --peer {cls.name}:lookup=10",
            )
        return cls(assisted=found.get("assisted", ""), lookup=int(lookup))

    def start(self, stage: Stage) -> None:
        """Load what is not there already."""
        if getattr(stage.engine.model, "adapter", None) is not None:
            raise UsageError(
                f"The peer '{self.name}' runs no adapter beside the weights.",
                hint="Load the target with --adapter-mode merged.",
            )
        self._stage, self._model = stage, stage.hf
        if self._assisted:
            self._draft = stage.hf_draft(self._assisted)

    def about(self) -> dict[str, str]:
        """Version, where the weights are from, and their precision."""
        assert self._stage is not None
        assert self._model is not None
        own = self._model is self._stage.engine.model
        told = {
            "version": f"transformers {transformers.__version__}",
            "weights": "the target's own module" if own else "loaded once more by the hf runtime",
            "precision": self._model.kind,
            "attention": _attention_of(self._model.module),
            "prompts": "token ids",
        }
        if self._draft is not None:
            told["draft precision"] = self._draft.kind
        return told

    def answer(self, ask: Ask) -> Reply:
        """One ``generate``, from the call to its return."""
        assert self._stage is not None
        assert self._model is not None
        module = self._model.module
        tokenizer = self._stage.engine.tokenizer
        ends = [] if tokenizer is None else sorted(tokenizer.eos_token_ids)
        config = self._config(ask, ends)
        ids = torch.tensor([list(ask.ids)], device=self._model.device)
        clock = _FirstToken()
        options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "streamer": clock}
        if self._draft is not None:
            options["assistant_model"] = self._draft.module
        modules = [module] if self._draft is None else [module, self._draft.module]
        on_gpu = [ids.device] if ids.device.type == "cuda" else []
        with (
            quiet(),
            torch.inference_mode(),
            torch.random.fork_rng(devices=on_gpu),
            _own_attention(*modules),
            _without_own_defaults(module),
        ):
            torch.manual_seed(ask.seed)
            started = perf_counter()
            made = module.generate(ids, generation_config=config, **options)
            emitted = made[0, ids.shape[1] :].tolist()  # waits for the device
            total_s = perf_counter() - started
        stopped = not ask.ignore_eos and bool(emitted) and emitted[-1] in ends
        return Reply(
            text="" if tokenizer is None else tokenizer.decode(emitted),
            tokens=len(emitted),
            counted="ids",
            ttft_s=(clock.at or started + total_s) - started,
            total_s=total_s,
            finish_reason="stop" if stopped else "length",
            token_ids=emitted,
        )

    def stop(self) -> None:
        """Let the modules go."""
        self._stage = self._model = self._draft = None

    def _config(self, ask: Ask, ends: list[int]) -> GenerationConfig:
        hot = ask.temperature > 0
        values: dict[str, Any] = {"top_k": 0, "top_p": 1.0, **ask.sampling} if hot else {}
        if "repetition_penalty" in ask.sampling:
            values["repetition_penalty"] = ask.sampling["repetition_penalty"]
        if hot:
            values["temperature"] = ask.temperature
        if self._lookup:
            values["prompt_lookup_num_tokens"] = self._lookup
        return GenerationConfig(
            max_new_tokens=ask.max_tokens,
            do_sample=hot,
            eos_token_id=None if ask.ignore_eos or not ends else ends,
            pad_token_id=ends[0] if ends else 0,
            **values,
        )


class _FirstToken(BaseStreamer):  # type: ignore[misc]  # transformers is not typed
    """When the first token came; the prompt is put before it."""

    def __init__(self) -> None:
        self.at: float | None = None
        self._prompt = True

    def put(self, value: Any) -> None:
        """Some tokens."""
        if self._prompt:
            self._prompt = False
        elif self.at is None:
            self.at = perf_counter()

    def end(self) -> None:
        """Nothing to do."""


def _attention_of(module: Any) -> str:
    used = str(module.config.get_text_config(decoder=True)._attn_implementation)
    return _OWN_ATTENTION if used == attention.NAME else used


@contextmanager
def _own_attention(*modules: Any) -> Iterator[None]:
    """transformers' attention where ours was put in its place, which pads for equal numbers."""
    ours = [
        module
        for module in modules
        if module.config.get_text_config(decoder=True)._attn_implementation == attention.NAME
    ]
    try:
        for module in ours:
            module.set_attn_implementation(_OWN_ATTENTION)
        yield
    finally:
        for module in ours:
            module.set_attn_implementation(attention.NAME)


@contextmanager
def _without_own_defaults(module: Any) -> Iterator[None]:
    """A model's generation settings would fill what a request leaves out."""
    kept = module.generation_config
    module.generation_config = GenerationConfig()
    try:
        yield
    finally:
        module.generation_config = kept

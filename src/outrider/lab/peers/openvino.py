"""OpenVINO GenAI on the target's files, in this process."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from outrider.errors import ModelError, UsageError
from outrider.lab.peers import Ask, Reply, Stage, options_of
from outrider.models.hf import first_line

__all__ = ["OpenVino"]

_NGRAM = 3  # tokens of a match, at most


class OpenVino:
    """``LLMPipeline``, plain or with prompt lookup, on the CPU and with torch's threads.

    Parameters
    ----------
    model
        A folder that holds the target in OpenVINO's own format; by default the target's .gguf.
    lookup
        Tokens that prompt lookup drafts at most.

    Raises
    ------
    UsageError
        When OpenVINO GenAI is not installed.
    """

    name = "openvino"
    takes = frozenset({"top_k", "top_p"})

    def __init__(self, label: str, *, model: str = "", lookup: int = 0) -> None:
        self.label = label
        self._model, self._lookup = model, lookup
        self._pipe: Any = None
        self._words: Any = None
        try:
            self._genai, self._ov = import_module("openvino_genai"), import_module("openvino")
        except ImportError as error:
            raise UsageError(
                f"The peer '{self.name}' needs OpenVINO GenAI: {first_line(error)}.",
                hint="Run: pip install openvino-genai",
            ) from error

    @classmethod
    def build(cls, argument: str) -> OpenVino:
        """``model=FOLDER``, ``lookup=N``, both or nothing."""
        found = options_of(cls.name, argument, ["model", "lookup"])
        lookup = found.get("lookup", "0")
        if not lookup.isdecimal() or ("lookup" in found and not int(lookup)):
            raise UsageError(
                f"'{cls.name}' takes model=FOLDER and lookup=N with N from 1; got '{argument}'.",
                hint=f"Example: --peer {cls.name}:lookup=8",
            )
        label = cls.name + (f":{argument}" if argument else "")
        return cls(label, model=found.get("model", ""), lookup=int(lookup))

    def start(self, stage: Stage) -> None:
        """Read the model.

        Raises
        ------
        UsageError
            When the target is no .gguf file and no folder was given, or it has an adapter.
        ModelError
            When OpenVINO cannot read it.
        """
        located = stage.engine.located
        path = Path(self._model).expanduser() if self._model else None
        if path is None and located is not None and located.kind == "gguf":
            path = located.path
        if path is None:
            raise UsageError(
                f"'{self.name}' reads .gguf files; '{stage.engine.model.name}' is none.",
                hint=f"Convert it with optimum, and say where: --peer {self.name}:model=FOLDER",
            )
        if located is not None and located.adapter is not None:
            raise UsageError(
                f"'{self.name}' is not given the target's adapter.", hint="Leave this --peer out."
            )
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
        if self._lookup:
            options["prompt_lookup"] = True
        try:
            self._pipe = self._genai.LLMPipeline(str(path), "CPU", **options)
        except Exception as error:  # whatever its many readers meet
            raise ModelError(f"OpenVINO cannot read '{path}': {first_line(error)}") from error
        self._words = stage.engine.tokenizer

    def about(self) -> dict[str, str]:
        """Version and weights."""
        return {
            "version": f"OpenVINO GenAI {self._genai.__version__}",
            "weights": self._model or "the target's .gguf file",
            "precision": "OpenVINO's own choice",
            "prompts": "token ids",
        }

    def answer(self, ask: Ask) -> Reply:
        """One generation, from the call to its return."""
        words = self._words
        ends = frozenset() if words is None else words.eos_token_ids
        ids = self._ov.Tensor(np.array([list(ask.ids)], dtype=np.int64))
        clock = _clock(self._genai)
        started = perf_counter()
        made = self._pipe.generate(ids, self._config(ask, ends), clock)
        total_s = perf_counter() - started
        emitted = [int(token) for token in made.tokens[0]]
        stopped = not ask.ignore_eos and bool(emitted) and emitted[-1] in ends
        return Reply(
            text="" if words is None else words.decode(emitted),
            tokens=len(emitted),
            counted="ids",
            ttft_s=(clock.at or started + total_s) - started,
            total_s=total_s,
            finish_reason="stop" if stopped or len(emitted) < ask.max_tokens else "length",
            token_ids=emitted,
        )

    def stop(self) -> None:
        """Let the model go."""
        self._pipe = None

    def _config(self, ask: Ask, ends: frozenset[int]) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = ask.max_tokens
        config.ignore_eos = ask.ignore_eos
        config.apply_chat_template = False
        if ends and not ask.ignore_eos:
            config.stop_token_ids = set(ends)
        config.do_sample = ask.temperature > 0
        if config.do_sample:
            config.temperature = ask.temperature
            config.rng_seed = ask.seed % (1 << 32)
            for name, value in ask.sampling.items():
                setattr(config, name, value)
        if self._lookup:
            config.num_assistant_tokens, config.max_ngram_size = self._lookup, _NGRAM
        return config


def _clock(genai: Any) -> Any:
    """When the first token came, as a streamer of a class that exists only with the package."""

    class Clock(genai.StreamerBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.at: float | None = None

        def write(self, token: Any) -> Any:
            if self.at is None:
                self.at = perf_counter()
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    return Clock()

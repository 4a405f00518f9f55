"""Speculative decoding inside transformers' own ``generate``."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    GenerateDecoderOnlyOutput,
    GenerationConfig,
    GenerationMixin,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StopStringCriteria,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from outrider.core.chooser import SeededChooser
from outrider.core.processors import Context, Law, Sampling
from outrider.drafters.beside import begin, new_cache
from outrider.engine.engine import Engine
from outrider.engine.generation import FinishReason, Generation
from outrider.engine.round import Session
from outrider.errors import PromptError, UsageError
from outrider.protocols import Drafter, Rule

__all__ = ["transformers_generate"]

_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
_UNDERSTOOD = {
    "attention_mask", "cache", "logits_to_keep", "position_ids", "token_type_ids", "use_cache",
}  # fmt: skip


def transformers_generate(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch length"],
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: str | Drafter | PreTrainedModel = "auto",
    rule: str | Rule = "auto",
    draft_length: int | Literal["auto"] = "auto",
    streamer: Any = None,
    stop_strings: str | list[str] | None = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | Int[Tensor, "batch longer"]:
    """For ``model.generate(**inputs, custom_generate=outrider.transformers_generate)``.

    Every setting of ``generate`` keeps its meaning: its processors make p, its stopping
    criteria are asked after each single token, its streamer gets each token. Processors must be
    functions of what they are given, since they are called for drafts too. The law of the
    output is that of plain ``generate``; at ``do_sample=False`` the ids are the same, up to
    near-ties of the model's own arithmetic. With sampling the seed is drawn from torch's
    generator, so ``torch.manual_seed`` fixes the output.

    Parameters
    ----------
    drafter, rule, draft_length
        As in ``outrider.Engine``; a transformers model with the same tokenizer may stand for a
        drafter.
    streamer, tokenizer
        By default those that ``generate`` was called with.
    stop_strings
        As in ``generate``, with ``tokenizer``; but ``generate`` itself refuses those that stand in
        a ``generation_config``, before this function is called.

    Returns
    -------
    Tensor or GenerateDecoderOnlyOutput
        What ``generate`` returns: sequences padded on the right, or with
        ``return_dict_in_generate`` also ``scores`` and ``logits`` where asked for (one prompt
        at a time). Several prompts are run one after the other, and what ends early is padded.

    Raises
    ------
    UsageError
        When a setting cannot be honoured: beams, contrastive or guided decoding, attentions or
        hidden states in the output, SynthID watermarks, a cache that already holds tokens, inputs
        besides text, stop strings without a tokenizer.

    Example
    -------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16,
    ...     num_hidden_layers=1, num_attention_heads=2, pad_token_id=0)
    >>> model = LlamaForCausalLM(config)
    >>> model.generate(torch.tensor([[1, 2, 1]]), max_new_tokens=3, eos_token_id=None,
    ...     custom_generate=transformers_generate, drafter="ngram").shape
    torch.Size([1, 6])
    """
    _refuse_what_cannot_be_kept(generation_config, logits_processor, model_kwargs)
    given = _given_to_generate()
    streamer = given.get("streamer") if streamer is None else streamer
    if stop_strings:
        tokenizer = given.get("tokenizer") if tokenizer is None else tokenizer
        if tokenizer is None:
            raise UsageError(
                "Stop strings need the model's tokenizer; got none.",
                hint="Pass tokenizer=tokenizer to generate.",
            )
        stop = StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings)
        stopping_criteria = StoppingCriteriaList([*stopping_criteria, stop])
    engine = Engine(model, drafter=drafter, rule=rule, draft_length=draft_length)
    wants_rows = generation_config.return_dict_in_generate and (
        generation_config.output_scores or generation_config.output_logits
    )
    if wants_rows and len(input_ids) > 1:
        raise UsageError(
            f"Scores and logits are returned for one prompt at a time; got {len(input_ids)}.",
            hint="Call generate once for each prompt, or leave output_scores out.",
        )
    mask = model_kwargs.get("attention_mask")
    rows: list[Tensor] = []
    for i, row in enumerate(input_ids):
        own = _for_row(logits_processor, i, len(input_ids))
        run = _Row(engine, row, None if mask is None else mask[i], own)
        rows.append(run.generate(generation_config, stopping_criteria, streamer))
    if streamer is not None:
        streamer.end()

    pad = generation_config._pad_token_tensor
    sequences = torch.nn.utils.rnn.pad_sequence(
        rows, batch_first=True, padding_value=float(pad) if pad is not None else 0.0
    )
    if not generation_config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=tuple(run.scores) if generation_config.output_scores else None,
        logits=tuple(run.logits) if generation_config.output_logits else None,
    )


def _given_to_generate() -> dict[str, Any]:
    """The streamer and the tokenizer of the running ``generate``, which hands on neither.

    transformers 5.24 keeps its streamer from a callable, and drops its tokenizer at once; that is
    still among the arguments of the decorator around ``generate``.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _GENERATE:
        frame = frame.f_back
    if frame is None or frame.f_back is None:
        return {}
    decorated = frame.f_back.f_locals.get("kwargs", {})
    return {
        "streamer": frame.f_locals.get("streamer"),
        "tokenizer": decorated.get("tokenizer"),
    }


class _Row:
    """One prompt of the batch. It is also the ``Ending`` of its own generation."""

    def __init__(
        self,
        engine: Engine,
        padded: Int[Tensor, " length"],
        mask: Int[Tensor, " length"] | None,
        processors: LogitsProcessorList,
    ) -> None:
        start = 0 if mask is None else int(mask.long().argmax())
        if mask is not None and not bool(mask[start:].all()):
            raise PromptError(
                "The attention mask hides tokens inside a prompt or after it.",
                hint="Pad on the left: tokenizer.padding_side = 'left'.",
            )
        self._engine = engine
        self._padded = padded
        self._prompt = padded[start:].tolist()
        # Processors and criteria see the padding, as in plain generate.
        self._before = padded[:start].tolist()
        self._processors = processors
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.scores: list[Float[Tensor, "1 V"]] = []
        self.logits: list[Float[Tensor, "1 V"]] = []

    def generate(
        self, config: GenerationConfig, criteria: StoppingCriteriaList, streamer: Any
    ) -> Int[Tensor, " longer"]:
        model = self._engine.model
        if not self._prompt:
            raise PromptError("A prompt is empty.", hint="Give at least one token.")
        self._criteria = criteria
        keep_rows = config.return_dict_in_generate and (
            config.output_scores or config.output_logits
        )
        sampling = Sampling(temperature=1.0 if config.do_sample else 0.0)
        limit = config.max_length - len(self._before)
        drafter = self._engine.drafter
        session = Session(
            model=model,
            cache=(cache := new_cache(model, drafter, limit)),
            draft=begin(drafter, self._prompt, limit, cache),
            rule=(rule := self._engine.make_rule(sampling)),
            policy=self._engine.make_policy(rule=rule),
            law=Law([self._process], greedy=sampling.greedy),
            chooser=SeededChooser(int(torch.randint(2**62, ())) if config.do_sample else 0),
            tokens=list(self._prompt),
            prompt_length=len(self._prompt),
            limit=limit,
        )
        session.keep_logits = bool(keep_rows)
        generation = Generation(session, self)
        for piece in generation:
            if streamer is not None:
                streamer.put(torch.tensor([piece.token_id]))
        for step, logits in enumerate(generation.logits):
            context = Context([*self._prompt, *self.token_ids[:step]], len(self._prompt))
            # A copy: rows made in inference mode are of no use to autograd.
            row = logits.to(torch.float32, copy=True)
            self.logits.append(row[None])
            self.scores.append(self._process(context, row)[None])
        new = torch.tensor(self.token_ids, dtype=self._padded.dtype, device=self._padded.device)
        return torch.cat([self._padded, new])

    def _process(self, context: Context, scores: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
        ids = torch.tensor([[*self._before, *context.tokens]], device=scores.device)
        processed: Tensor = self._processors(ids, scores[None].clone())
        return processed[0]

    def push(self, token_id: int) -> str:
        self.token_ids.append(token_id)
        ids = torch.tensor(
            [[*self._before, *self._prompt, *self.token_ids]], device=self._padded.device
        )
        if bool(self._criteria(ids, None).all()):
            self.finish_reason = "stop"
        return ""


def _for_row(processors: LogitsProcessorList, row: int, rows: int) -> LogitsProcessorList:
    """For one row of a batch: some processors hold something for each of its rows."""

    def own(processor: Any) -> Any:
        one = copy.copy(processor)
        match one:
            case RepetitionPenaltyLogitsProcessor(prompt_ignore_length=Tensor() as lengths):
                one.prompt_ignore_length = lengths[row : row + 1]
            case EncoderRepetitionPenaltyLogitsProcessor(encoder_input_ids=prompts):
                one.encoder_input_ids = prompts[row * len(prompts) // rows][None]
            case EncoderNoRepeatNGramLogitsProcessor(generated_ngrams=ngrams):
                one.generated_ngrams, one.batch_size = [ngrams[row * len(ngrams) // rows]], 1
            case PrefixConstrainedLogitsProcessor(_prefix_allowed_tokens_fn=f, _num_beams=beams):
                one._prefix_allowed_tokens_fn = lambda _, ids: f(row // beams, ids)
                one._num_beams = 1
            case _:
                return processor
        return one

    return LogitsProcessorList(own(processor) for processor in processors)


def _refuse_what_cannot_be_kept(
    config: GenerationConfig, processors: Sequence[Any], model_kwargs: dict[str, Any]
) -> None:
    refused = {
        "num_beams": (config.num_beams or 1) > 1,
        "penalty_alpha": bool(config.penalty_alpha),
        "guidance_scale": any(
            isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in processors
        ),
        "watermarking_config": any(
            # It counts its own calls, and here it is called for drafts too.
            isinstance(p, SynthIDTextWatermarkLogitsProcessor)
            for p in processors
        ),
        "output_attentions": bool(config.output_attentions),
        "output_hidden_states": bool(config.output_hidden_states),
    }
    for name, here in refused.items():
        if here:
            raise UsageError(
                f"Speculative decoding cannot honour {name}.",
                hint=f"Leave {name} out, or call generate without custom_generate.",
            )
    cache = model_kwargs.get("cache")
    if cache is not None and int(cache.get_seq_length()) > 0:
        raise UsageError(
            f"The given cache already holds {int(cache.get_seq_length())} tokens; an empty one was "
            "expected.",
            hint="Leave cache out; for chats, Engine.conversation keeps one.",
        )
    extra = [n for n, v in model_kwargs.items() if n not in _UNDERSTOOD and v is not None]
    if extra:
        raise UsageError(
            f"Inputs besides text are not understood: {', '.join(sorted(extra))}.",
            hint="Call generate without custom_generate.",
        )

"""The face of the library: a target, a drafter and a rule, ready to generate."""

from __future__ import annotations

import re
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.core.chooser import SeededChooser
from outrider.core.price import NOMINAL, Price
from outrider.core.processors import Sampling, is_whole
from outrider.drafters.mixed import split_parts
from outrider.drafters.model import ModelDrafter
from outrider.engine.conversation import Conversation
from outrider.engine.generation import Generation, Output
from outrider.engine.grammar import Grammar, Grammars, Guided
from outrider.engine.loading import (
    adapted,
    check_adapter_mode,
    draft_device,
    find_target,
    load_draft,
    load_head,
    load_model,
    load_parallel_heads,
    parse_device,
    parse_dtype,
)
from outrider.engine.matching import Mismatch, measure, mismatch
from outrider.engine.prefix import Prefix
from outrider.engine.pricing import measure_rows, with_steps
from outrider.engine.profile import Choice, Profile, find_profile, has_profiles
from outrider.engine.round import Session
from outrider.engine.transcript import Transcript
from outrider.errors import OutriderError, PromptError, RollbackError, SamplingError, UsageError
from outrider.models.adapter import read_adapter
from outrider.models.drafts import describe, read_record
from outrider.models.fingerprint import Fingerprint, fingerprint
from outrider.models.heads.folder import shipped_head
from outrider.models.hf import HFModel, eos_token_ids
from outrider.models.locate import Located
from outrider.models.tokenizer import HFTokenizer
from outrider.policies.fixed import Fixed
from outrider.protocols import (
    Drafter,
    Head,
    Model,
    ParallelHeads,
    Policy,
    Progress,
    Rule,
    Setting,
    Tokenizer,
)
from outrider.registry import (
    DRAFTERS,
    POLICIES,
    RULES,
    RUNTIMES,
    did_you_mean,
    refuse_argument,
)

__all__ = ["Engine", "Prompt", "SamplingArguments", "check_load"]

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""A text to continue, a conversation to answer, or token ids as they are."""


class SamplingArguments(TypedDict, total=False):
    """Sampling values that ``generate`` and ``stream`` take; see ``core.processors.Sampling``."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    min_tokens: int


class Engine:
    """Generates with a target model, sooner where a drafter guesses well, and never otherwise.

    Parameters
    ----------
    model
        A transformers model, or anything that offers ``outrider.protocols.Model``.
    tokenizer
        Its tokenizer, from transformers or of ``outrider.protocols.Tokenizer``. Without one,
        prompts are token ids and outputs have no text.
    drafter
        ``auto``, ``none``, ``ngram``, ``model:PATH``, ..., a drafter object, or a transformers
        model with the target's tokenizer.
    rule
        ``auto`` (greedy at temperature 0, else coupled), ``greedy``, ``coupled``, ``rejection``,
        ``block``.
    draft_length
        Tokens drafted in a round; ``auto`` is the drafter's own default; 0 drafts nothing;
        ``adaptive`` follows the acceptance of the rounds before (``adaptive:24``: at most 24).
    strict
        Refuse a draft head that was made for another state of the target, or does not say for
        which; by default a warning tells what differs and what the head is worth.
    load_options
        ``dtype`` and ``device`` for draft models that are loaded by name.
    located
        Where the target's files are, for its fingerprint.

    Raises
    ------
    UsageError
        When a drafter, a rule or a draft length is not known, or is none.
    DraftMismatchError
        When ``strict``, and the drafter's head does not match.
    RollbackError
        When the target's cache cannot take rejected drafts back.

    Example
    -------
    >>> from outrider import Engine
    >>> engine = Engine.load("toy:vocab=4", drafter="ngram")
    >>> engine.generate("abab", max_tokens=3).trace.summary()["emitted_tokens"]
    3
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        drafter: str | Drafter | PreTrainedModel = "auto",
        rule: str | Rule = "auto",
        draft_length: int | str = "auto",
        strict: bool = False,
        load_options: Mapping[str, Any] | None = None,
        located: Located | None = None,
    ) -> None:
        self.model, self.tokenizer = _adopt(model, tokenizer)
        self.strict = strict
        self._located = located
        self._fingerprint: Fingerprint | None = None
        self._mismatches: list[Mismatch] = []
        self._load_options = dict(load_options or {})
        self._drafters: dict[str, Drafter] = {}
        self._drafts: dict[str, Model] = {}
        self._asked = drafter
        self._grammars: Grammars | None = None
        self._rows: tuple[Model, Price] | None = None
        self._prices: dict[tuple[int, str], tuple[Drafter, Price]] = {}
        self._auto = isinstance(drafter, str) and drafter == "auto"
        self.follows_profile = True  # of outrider tune; which itself must not
        self._profile: tuple[Profile | None] | None = None
        self.rule = rule
        self.draft_length = draft_length
        self.drafter = self.make_drafter(drafter)
        self.make_rule(Sampling())
        self.make_policy()

    @classmethod
    def load(
        cls,
        target: str,
        *,
        drafter: str | Drafter = "auto",
        rule: str | Rule = "auto",
        draft_length: int | str = "auto",
        runtime: str = "auto",
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        adapter: str | Path | None = None,
        adapter_mode: str = "merged",
        strict: bool = False,
    ) -> Engine:
        """Load a target and get ready.

        Parameters
        ----------
        target
            A catalogue name (``smollm2-135m``), a ``.gguf`` file, a transformers folder, a hub
            id, or ``toy``.
        drafter, rule, draft_length
            As in ``Engine``.
        runtime, dtype, device
            ``auto`` or ``None`` pick what fits the model and the machine. The device ``tp`` spreads
            the target over the processes that torchrun started; in all but the first this call
            serves that one, and does not return.
        adapter
            The folder of a LoRA adapter in PEFT's format.
        adapter_mode
            ``merged``: the adapter is added to the target's weights. ``live``: it runs beside them,
            in the ``hf`` runtime alone, and ``use_adapter`` changes it.
        strict
            As in ``Engine``.

        Raises
        ------
        UsageError
            When a name or the device is not known; told before anything is loaded.
        ModelError
            When target or draft cannot be found, fetched, fitted into memory or read.
        """
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        check_load(
            drafter=drafter,
            rule=rule,
            draft_length=draft_length,
            runtime=runtime,
            adapter_mode=adapter_mode,
            **options,
        )
        located = find_target(target, adapter)
        model, tokenizer = load_model(
            located, runtime=runtime, adapter_mode=adapter_mode, **options
        )
        return cls(
            model,
            tokenizer,
            drafter=drafter,
            rule=rule,
            draft_length=draft_length,
            strict=strict,
            load_options=options | {"device": draft_device(device)},
            located=located,
        )

    @property
    def located(self) -> Located | None:
        """Where the target's files are, with its adapter; ``None`` for a model object."""
        return self._located

    def fingerprint(self) -> Fingerprint | None:
        """What a draft head for this target must be made for: short hashes of its weights,
        tokenizer, chat template, adapter and precision.

        ``None`` for a target without files to look at: a toy, or a model object.

        Raises
        ------
        ModelFileError
            When the weights cannot be read any more.
        """
        if self._fingerprint is None and self._located is not None and self.tokenizer is not None:
            precision = getattr(self.model, "kind", "")
            self._fingerprint = fingerprint(self._located, self.tokenizer, precision)
        return self._fingerprint

    def use_adapter(self, adapter: str | Path | None) -> None:
        """Run another LoRA adapter beside the target's weights, or none; nothing is loaded again.

        Requests that have begun go on with the adapter that they began with. Caches that they
        leave behind, a conversation's too, are not used under another one. The fingerprint
        follows, and the drafter is made again: a head that does not match is told as at load.

        Parameters
        ----------
        adapter
            The folder of an adapter in PEFT's format; ``None`` leaves the base alone.

        Raises
        ------
        UsageError
            When the target's runtime has no live adapters, or one is merged into its weights.
        ModelError
            When the adapter cannot be read or was made for another base. Then, and when
            ``strict`` refuses the drafter, all is as it was.

        Example
        -------
        >>> from outrider import Engine
        >>> engine = Engine.load("my-model", adapter_mode="live")  # doctest: +SKIP
        >>> engine.use_adapter("my-adapter")  # doctest: +SKIP
        """
        folder = None if adapter is None else Path(adapter).expanduser()
        held = self._located.adapter if self._located else None
        if held is not None and getattr(self.model, "adapter", None) is None:
            raise UsageError(
                f"The adapter '{held}' is merged into the weights of '{self.model.name}'.",
                hint="Load the target with --adapter-mode live to change adapters.",
            )
        model = adapted(self.model, None if folder is None else read_adapter(folder))
        before = dict(vars(self))
        self.model, self._drafters = model, {}
        self._fingerprint = self._profile = None
        if self._rows is not None:  # a row costs much the same, and measuring it takes time
            self._rows = model, self._rows[1]
        if self._located is not None:
            self._located = replace(self._located, adapter=folder)
        try:
            self.drafter = self.make_drafter(self._asked)
        except BaseException:
            vars(self).update(before)
            raise

    def generate(self, prompt: Prompt, **options: Any) -> Output:
        """Run a request to its end; takes the arguments of ``stream``."""
        return self.stream(prompt, **options).output

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 128,
        stop: str | Sequence[str] | None = (),
        stop_token_ids: Sequence[int] | None = (),
        ignore_eos: bool = False,
        seed: int | None = None,
        plain: bool = False,
        drafter: str | Drafter | None = None,
        rule: str | Rule | None = None,
        draft_length: int | str | None = None,
        grammar: Grammar | None = None,
        prefix: Prefix | None = None,
        progress: Progress | None = None,
        **sampling: Unpack[SamplingArguments],
    ) -> Generation:
        """Start a request and hand out its output token by token.

        Parameters
        ----------
        prompt
            A text to continue, messages to answer (through the model's chat template), or
            token ids.
        max_tokens
            Most tokens to emit.
        stop, stop_token_ids
            Strings and tokens that end the output, besides the model's own end tokens.
        ignore_eos
            Whether to go on past the model's end tokens, as benchmarks of fixed length do.
        seed
            Fixes all chance; by default one is drawn, and told in the output.
        plain
            Decode without a drafter.
        drafter, rule, draft_length
            For this request, in place of the engine's own.
        grammar
            What the output may be, such as ``Grammar.json_schema({...})``. An output that comes to
            its end by itself is one that the grammar describes; ``max_tokens`` may cut it short.
        prefix
            What an earlier request left in the cache.
        progress
            Called while a long prompt is fed.
        sampling
            ``temperature=0.7, top_p=0.9`` and so on; see ``SamplingArguments``.

        Returns
        -------
        Generation
            Iterate it for pieces; its ``output`` is the whole.

        Raises
        ------
        SamplingError
            When a value is out of its range or unknown.
        PromptError
            When the prompt is empty, or leaves no room in the context.
        UsageError
            When the grammar cannot be used.
        NumericalError
            While running, when the model's logits are not numbers.
        """
        values = _sampling(sampling)
        if grammar is not None and (ignore_eos or values.min_tokens):
            raise SamplingError(
                "A grammar decides where an output ends, so ignore_eos and min_tokens cannot.",
                hint="Leave them out, or let the grammar ask for a longer text.",
            )
        ids = self.encode(prompt)
        room = self.model.context_length - len(ids)
        if room < 1:
            raise PromptError(
                f"The prompt has {len(ids)} tokens; the context of '{self.model.name}' holds "
                f"{self.model.context_length}, and at least one must be left for the answer.",
                hint="Shorten the prompt.",
            )
        if tuned := self._tuned(values.greedy, drafter, rule, draft_length):
            drafter, rule, draft_length = tuned.drafter, tuned.rule, tuned.draft_length
        how = self.make_rule(values, rule)
        if drafter is None:
            drafter = "auto" if self._auto and not how.trees else self.drafter
        draft = self.make_drafter("none" if plain else drafter, trees=how.trees)
        if draft.trees and not how.trees:
            raise UsageError(
                f"The rule '{how.name}' judges chains only; this drafter proposes trees.",
                hint="Use --rule auto, rejection or coupled, or leave the tree out of --drafter.",
            )
        policy = self.make_policy(draft, draft_length, how)
        eos = self.tokenizer.eos_token_ids if self.tokenizer and not ignore_eos else frozenset()
        ends = eos | _stop_ids(stop_token_ids, self.model.vocab_size)
        ending = Transcript(
            self.tokenizer,
            max_tokens=max_tokens,
            eos_token_ids=ends,
            stop_strings=stop,
            room=room,
        )
        rows = self.model.vocab_size
        mask = None if grammar is None else self.grammars.mask(grammar, rows)
        seed = secrets.randbits(63) if seed is None else seed
        limit = len(ids) + ending.max_tokens
        # A cache that outlives this request must have room for the next one.
        capacity = limit if prefix is None else self.model.context_length
        prefix = prefix or Prefix()
        cache = prefix.cache_for(self.model, draft, ids, capacity)
        session = Session(
            model=self.model,
            cache=cache,
            draft=prefix.draft_for(draft, ids, capacity, cache),
            rule=how,
            policy=policy,
            law=values.law(ends, rows, mask),
            chooser=SeededChooser(seed),
            tokens=ids,
            prompt_length=len(ids),
            limit=limit,
        )
        if mask is not None and draft.name != "none":
            session.draft = Guided(session.draft, mask, len(ids))
        return Generation(
            session, ending, seed=seed, drafter=draft.name, rule=how.name, progress=progress
        )

    def conversation(self, system: str | None = None) -> Conversation:
        """A chat that keeps the cache of earlier turns."""
        return Conversation(self, system)

    @property
    def grammars(self) -> Grammars:
        """Grammars in the tokenizer's tokens.

        Raises
        ------
        UsageError
            When there is no tokenizer, or none that a grammar can work with.
        """
        if self._grammars is None:
            if self.tokenizer is None:
                raise UsageError(
                    "A grammar needs a tokenizer, and this engine has none.",
                    hint="Pass tokenizer=... to Engine.",
                )
            self._grammars = Grammars(self.tokenizer)
        return self._grammars

    def encode(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """A prompt's token ids.

        Parameters
        ----------
        prompt
            As for ``stream``.
        tools
            Functions that the model may call, as its chat template wants them; for messages.

        Raises
        ------
        PromptError
            When it is none of the three, is empty, or holds ids outside the vocabulary.
        """
        hint = "Give a text, a list of messages, or the target's own token ids."
        if not isinstance(prompt, Iterable):
            raise PromptError(f"A prompt was expected; got {prompt!r}.", hint=hint)
        ids: Any = prompt if isinstance(prompt, str) else list(prompt)
        words = None
        if isinstance(ids, str) or any(isinstance(part, Mapping) for part in ids):
            words = self.tokenizer
            if words is None:
                raise PromptError(
                    "This engine has no tokenizer, so a prompt must be token ids.",
                    hint="Pass tokenizer=... to Engine.",
                )
            ids = words.encode(ids) if isinstance(ids, str) else words.encode_messages(ids, tools)
        if not ids:
            raise PromptError("The prompt is empty.", hint="Give at least one token.")
        rows = self.model.vocab_size
        if wrong := _not_ids(ids, rows):
            if words is not None:
                raise PromptError(
                    f"The tokenizer's token {wrong[0]}, {words.decode(wrong[:1])!r}, is none of "
                    f"the {rows} that '{self.model.name}' has rows for.",
                    hint="Leave that word out, or use the tokenizer that belongs to the model.",
                )
            raise PromptError(
                f"Token ids are whole numbers from 0 to {rows - 1}; the prompt holds {wrong[0]!r}.",
                hint=hint,
            )
        return [int(token) for token in ids]

    def _tuned(self, greedy: bool, drafter: Any, rule: Any, draft_length: Any) -> Choice | None:
        """What ``outrider tune`` chose for this target on this machine, if it did, and if neither
        the request nor the engine says otherwise."""
        own = self._asked, self.rule, self.draft_length
        asked = drafter, rule, draft_length
        said = [mine if theirs is None else theirs for mine, theirs in zip(own, asked, strict=True)]
        asks = not all(isinstance(one, str) and one == "auto" for one in said)
        profile = None if asks or not self.follows_profile else self.profile
        choice = profile.choice(greedy) if profile is not None else None
        if choice is not None:
            try:
                self.make_drafter(choice.drafter)
            except OutriderError as error:
                raise UsageError(
                    f"outrider tune chose --drafter {choice.drafter} for this target, which cannot "
                    f"be had any more: {error.problem}",
                    hint="Run outrider tune again, or outrider tune --forget.",
                ) from error
        return choice

    @property
    def profile(self) -> Profile | None:
        """What ``outrider tune`` found for this target on this machine.

        Raises
        ------
        UsageError
            When its file is broken.
        """
        if not has_profiles():
            return None
        if self._profile is None:
            self._profile = (find_profile(self.fingerprint(), self.model),)
        return self._profile[0]

    def make_rule(self, sampling: Sampling, rule: str | Rule | None = None) -> Rule:
        """The rule for one request.

        Raises
        ------
        SamplingError
            When it is ``greedy`` and the temperature is not 0.
        """
        return _rule(self.rule if rule is None else rule, sampling)

    def make_policy(
        self,
        drafter: Drafter | None = None,
        draft_length: int | str | None = None,
        rule: Rule | None = None,
    ) -> Policy:
        """The draft-length policy for one request; it belongs to that request alone.

        Where the text depends on what is drafted, that is under a rule that is not ``invariant``,
        nothing is decided by what this machine's clock says.
        """
        draft = drafter or self.drafter
        length = self.draft_length if draft_length is None else draft_length
        if length == "auto":
            length = f"adaptive:{draft.default_length}" if draft.default_length else 0
        return _policy(length, lambda: self.price(draft, rule))

    def price(self, drafter: Drafter | None = None, rule: Rule | None = None) -> Price:
        """What rows of a pass and steps of a drafter cost here, measured when first asked for.

        Nominal prices under a rule whose text depends on what is drafted.
        """
        if rule is None or not rule.invariant:
            return NOMINAL
        draft = drafter or self.drafter
        if self._rows is None or self._rows[0] is not self.model:
            self._rows = self.model, measure_rows(self.model)
            self._prices.clear()
        key = id(draft), rule.name
        if key not in self._prices:  # the drafter is kept, so that its id stays its own
            self._prices[key] = draft, with_steps(self._rows[1], self.model, draft, rule)
        return self._prices[key][1]

    def make_drafter(self, drafter: Any, *, trees: bool = True) -> Drafter:
        """A drafter from a name, a transformers model or a drafter object.

        ``trees``: whether ``auto`` may be one that proposes trees.
        """
        if isinstance(drafter, str):
            if drafter == "auto":
                drafter = self._default_drafter(trees)
            if drafter not in self._drafters:
                made, argument = _drafter_class(drafter)
                setting = Setting(
                    self.model,
                    self._load_draft,
                    self.tokenizer,
                    self._load_any,
                    self.make_drafter,
                    self._load_head,
                    self._load_parallel_heads,
                )
                self._drafters[drafter] = made.build(argument, setting)
                self._tell_mismatches(self._drafters[drafter])
            drafter = self._drafters[drafter]
        elif isinstance(drafter, PreTrainedModel):
            drafter = ModelDrafter(HFModel(drafter))
        _check_offers(drafter, Drafter, "drafter")
        if drafter.name != "none" and self.model.rollback == "none":
            raise RollbackError(
                f"The cache of '{self.model.name}' cannot take rejected drafts back.",
                hint="Use --drafter none.",
            )
        if drafter.trees and not self.model.trees:
            raise UsageError(
                f"'{self.model.name}' scores chains only; this drafter proposes trees.",
                hint="Leave the tree out of --drafter.",
            )
        ready: Drafter = drafter
        return ready

    def _default_drafter(self, trees: bool) -> str:
        """The head that comes with the target, where it runs as the head knows it; else the text
        itself is looked up."""
        head = shipped_head(self.model.name)
        if head is not None and _precision_of(head) == getattr(self.model, "kind", ""):
            return "suffix:match=3+eagle" if trees else "suffix:match=3+eagle#chain"
        return "ngram"

    def _load_draft(self, path: str) -> Model:
        if path not in self._drafts:
            self._drafts[path] = load_draft(path, self.tokenizer, **self._load_options)
        # A model that was fitted to a target says to which one; others have nothing to say.
        if (record := read_record(Path(path))) is not None:
            self._check_head(Path(path), record)
        return self._drafts[path]

    def _load_head(self, path: str) -> Head:
        return load_head(path, self.model, self._check_head)

    def _load_parallel_heads(self, path: str) -> ParallelHeads:
        return load_parallel_heads(path, self.model, self._check_head)

    def _check_head(self, folder: Path, about: Mapping[str, Any]) -> None:
        # Reading a target's fingerprint takes seconds the first time: not for a head without one.
        target = self.fingerprint() if self.strict or about.get("target") else None
        found = mismatch(folder, about, target, strict=self.strict)
        if found is not None and self.strict:
            raise found.error()
        if found is not None:
            self._mismatches.append(found)

    def _tell_mismatches(self, drafter: Drafter) -> None:
        """Once a drafter is whole, since what it is worth can be measured then."""
        found, self._mismatches = self._mismatches, []
        for one in found:
            warnings.warn(one.warning(measure(self, drafter)), stacklevel=3)

    def _load_any(self, path: str) -> tuple[Model, Tokenizer]:
        return load_model(path, **self._load_options)


def _adopt(model: Any, tokenizer: Any) -> tuple[Model, Tokenizer | None]:
    """Wrap what comes from transformers; leave what already fits."""
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        tokenizer = HFTokenizer(tokenizer, eos_token_ids(model))
    if isinstance(model, PreTrainedModel):
        model = HFModel(model, vocab_size=tokenizer.vocab_size if tokenizer else None)
    if not hasattr(model, "score"):
        raise UsageError(
            f"A model must be a transformers model or offer outrider.protocols.Model; got "
            f"{type(model).__name__}.",
            hint="Use Engine.load(name) to load one by name.",
        )
    return model, tokenizer


def check_load(
    *,
    drafter: Any = "auto",
    rule: Any = "auto",
    draft_length: Any = "auto",
    runtime: Any = "auto",
    dtype: Any = None,
    device: Any = None,
    adapter_mode: Any = "merged",
    temperature: float = 0.0,
) -> None:
    """Raise ``UsageError`` for what is wrong in a request before minutes are spent on loading."""
    if isinstance(drafter, str):
        _drafter_class(drafter)
    else:
        _check_offers(drafter, Drafter, "drafter")
    _rule(rule, Sampling(temperature=temperature))
    if draft_length != "auto":
        _policy(draft_length, lambda: NOMINAL)
    if runtime != "auto":
        RUNTIMES.load(runtime)
    check_adapter_mode(adapter_mode, runtime)
    parse_dtype(dtype)
    parse_device(device)


def _check_offers(part: Any, seam: type, kind: str) -> None:
    """Refuse what is no part of a kind: anything at all, or a class in place of an object."""
    if isinstance(part, type) or not isinstance(part, seam):
        raise UsageError(
            f"A {kind} is a name or offers outrider.protocols.{seam.__name__}; got {part!r}.",
            hint="'auto' picks one.",
        )


def _rule(rule: Any, sampling: Sampling) -> Rule:
    """A rule from a name or an object, if it is fit for the temperature."""
    if isinstance(rule, str):
        auto = "greedy" if sampling.greedy else "coupled"
        rule = RULES.load(auto if rule == "auto" else rule)()
    _check_offers(rule, Rule, "rule")
    made: Rule = rule
    if made.name == "greedy" and not sampling.greedy:
        raise SamplingError(
            f"The greedy rule needs temperature 0; got {sampling.temperature}.",
            hint="Use --rule auto, rejection or coupled.",
        )
    return made


def _not_ids(ids: Iterable[Any], vocab_size: int) -> list[Any]:
    """Those that are no token ids."""
    return [t for t in ids if not (is_whole(t) and 0 <= t < vocab_size)]


def _stop_ids(ids: Any, vocab_size: int) -> frozenset[int]:
    given = () if ids is None else ids
    wrong = _not_ids(given, vocab_size) if isinstance(given, Iterable) else [given]
    if wrong:
        raise SamplingError(
            f"stop_token_ids are whole numbers from 0 to {vocab_size - 1}, in a list; got "
            f"{wrong[0]!r}.",
            hint="Give the target's own token ids.",
        )
    return frozenset(int(token) for token in given)


def _drafter_class(text: str) -> tuple[Any, str]:
    """From ``name:argument``, ``name#tree`` or ``a+b`` to the drafter's class and the argument."""
    name = re.split("[:#]", text)[0]
    argument = text[len(name) :].removeprefix(":")
    if name != "mixed" and len(split_parts(text)) > 1:
        name, argument = "mixed", text
    if name == "mixed":
        for part in filter(None, split_parts(argument)):
            _drafter_class(part)
    if name == "auto":
        refuse_argument(name, argument)
        name = "ngram"
    return DRAFTERS.load(name), argument


def _policy(length: Any, price: Callable[[], Price]) -> Policy:
    """From a number or ``name:argument`` to a policy of its own for one request."""
    if isinstance(length, bool) or not isinstance(length, int | str):
        raise SamplingError(
            f"draft_length must be a number, 'auto' or a policy's name; got {length!r}."
        )
    if isinstance(length, int):
        return Fixed(length)
    name, _, argument = length.partition(":")
    policy = POLICIES.load(name)
    made: Policy = policy.build(argument, price())
    return made


def _sampling(values: Mapping[str, Any]) -> Sampling:
    known = [f.name for f in fields(Sampling)]
    for name in values:
        if name not in known:
            raise SamplingError(f"There is no option '{name}'.", hint=did_you_mean(name, known))
    return Sampling(**values)


@cache
def _precision_of(head: Path) -> str | None:
    """Of the target that a head was made for; read once, since ``auto`` may be asked for anew."""
    return (describe(head).target or {}).get("precision")

"""The measurement: configurations and plain decoding in turns, prompt by prompt.

A turn is one prompt at one temperature, decoded by every configuration and by plain decoding, in
an order shuffled from the seed: a token of one, a token of the next, and so on until all have come
to their ends, each timed by its own rounds alone. So a drift of the machine's speed falls on all
within milliseconds, and none always comes after the same one. On a GPU, where memory is told for
each apart, and with turns by prompt, one decodes the whole prompt after the other. Target,
precision, prompt, sampling values and seed are the same for all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import torch

from outrider.engine.batch import Batch
from outrider.engine.engine import Engine, check_load
from outrider.engine.generation import Generation
from outrider.engine.prompts import PromptRecord
from outrider.errors import PromptError, UsageError
from outrider.lab.configuration import Configuration, check_labels
from outrider.lab.entropy import token_entropies
from outrider.lab.memory import cache_bytes, peak_bytes, tensor_bytes
from outrider.lab.peers import Ask, Peer, Stage, changed, check_peers
from outrider.lab.provenance import model_conditions
from outrider.lab.record import Record
from outrider.models.hf import first_line
from outrider.protocols import Model

__all__ = ["Bench", "Key", "Turn", "Turns", "check_measurable"]

_WARM_UP_TOKENS = 16
_LARGEST_BATCH = 256
_SEEDS = 1 << 62
_OVER = object()

Key = tuple[str, int, int, int, float, str]
"""Of a record: configuration, prompt, repeat, batch, temperature and adapter."""

Turns = Literal["token", "prompt"]
"""What configurations take turns by."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt, or several side by side, decoded by all configurations in this order.

    Parameters
    ----------
    prompt, beside
        The prompt's number, and those that share its batch.
    fillers
        Prompts that only keep the last batch full; they are not recorded.
    """

    repeat: int
    prompt: int
    batch: int
    temperature: float
    order: tuple[Configuration | Peer, ...]
    beside: tuple[int, ...] = ()
    fillers: tuple[int, ...] = ()

    @property
    def prompts(self) -> tuple[int, ...]:
        """All that are recorded."""
        return self.prompt, *self.beside


@dataclass
class _Lane:
    """A configuration's share of a turn: one generation, or several side by side."""

    configuration: Configuration
    order: int
    streams: Sequence[Generation]
    texts: dict[int, list[str]] = field(default_factory=dict)

    def decode(self, model: Model) -> Iterator[None]:
        """Run to the end, a token, or a step of all, at a time."""
        self.texts = {id(one): [] for one in self.streams}
        if len(self.streams) == 1:
            (stream,) = self.streams
            for piece in stream:
                self.texts[id(stream)].append(piece.text)
                yield
            return
        batch = Batch(model)
        for one in self.streams:
            batch.add(one)
        while len(batch):
            for step in batch.step():
                if step.error is not None:
                    raise step.error
                self.texts[id(step.generation)] += [piece.text for piece in step.pieces]
            yield


def check_measurable(
    configurations: Sequence[Configuration],
    temperatures: Sequence[float],
    *,
    batches: Sequence[int] = (1,),
    peers: Sequence[Peer] = (),
    sampling: Mapping[str, Any] | None = None,
    **load_options: Any,
) -> None:
    """Raise ``UsageError`` for what is wrong in a request before a model is loaded for it.

    ``load_options``: ``runtime``, ``dtype`` and ``device`` for the target.
    """
    check_labels([Configuration.plain(), *configurations, *peers])
    check_peers(peers, sampling or {})
    if peers and tuple(batches) != (1,):
        raise UsageError(
            f"Peers decode one prompt at a time; got batch sizes {list(batches)}.",
            hint="Leave --batch or --peer out.",
        )
    for name, values in (("temperature", temperatures), ("batch size", batches)):
        if len(set(values)) < len(values):
            raise UsageError(f"A {name} is given twice: {list(values)}.", hint="Leave one out.")
    if wrong := [size for size in batches if not 1 <= size <= _LARGEST_BATCH]:
        raise UsageError(
            f"A batch holds one sequence or more, and at most {_LARGEST_BATCH}; got a batch size "
            f"of {wrong[0]}.",
            hint="Example: --batch 4",
        )
    for one in configurations:
        for temperature in temperatures:
            check_load(
                drafter=one.drafter,
                rule=one.rule,
                draft_length=one.draft_length,
                temperature=temperature,
                **load_options,
            )


class Bench:
    """One target's measurements. Iterate ``run`` for records; each is a finished generation.

    Parameters
    ----------
    engine
        With the target; its own drafter and rule do not matter.
    prompts
        What to answer. A text becomes a user's message where the target has a chat template.
    configurations
        What to measure besides plain decoding.
    temperatures, batches
        Each gets turns of its own.
    max_tokens
        Most tokens of an answer.
    repeats
        How often all turns are gone through. A repeat does the same work again: it steadies the
        times of a prompt and adds no prompts.
    seed
        For the orders, and for sampling: a prompt has the same seed in every configuration.
    sampling
        Further sampling values, the same for all.
    ignore_eos
        Go on past the model's end tokens, so that all answers are equally long.
    entropies
        Measure the target's entropy at each token, between the turns.
    adapter
        What to call the target's adapter; empty if it has none.
    peers
        Other programs, measured in the same turns; ``lab.peers.running`` starts and stops them.
    turns
        By what configurations take turns: ``token`` or ``prompt``.

    Raises
    ------
    UsageError
        When two configurations have one label, or an option is out of its range.
    PromptError
        When a prompt is empty or leaves no room in the context; its name is told.

    Example
    -------
    >>> engine = Engine.load("toy:vocab=4", drafter="none")
    >>> prompts = [PromptRecord("1", "letters", "abab")]
    >>> bench = Bench(engine, prompts, [Configuration("ngram")], max_tokens=8)
    >>> sorted((r.configuration, len(r.token_ids)) for r in bench.run())
    [('ngram', 8), ('plain', 8)]
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[PromptRecord],
        configurations: Sequence[Configuration],
        *,
        temperatures: Sequence[float] = (0.0,),
        batches: Sequence[int] = (1,),
        max_tokens: int = 128,
        repeats: int = 1,
        seed: int = 0,
        sampling: Mapping[str, Any] | None = None,
        ignore_eos: bool = False,
        entropies: bool = True,
        adapter: str = "",
        peers: Sequence[Peer] = (),
        turns: Turns = "token",
    ) -> None:
        check_measurable(
            configurations, temperatures, batches=batches, peers=peers, sampling=sampling
        )
        if not prompts or not temperatures or not batches or repeats < 1:
            raise UsageError(
                f"At least one prompt, temperature, batch size and repeat are needed; got "
                f"{len(prompts)}, {len(temperatures)}, {len(batches)} and {repeats}.",
                hint="Leave --limit and --repeats at their defaults.",
            )
        self.engine = engine
        self.configurations = (Configuration.plain(), *configurations)
        self.peers = tuple(peers)
        self.kinds = [record.kind for record in prompts]
        self.prompts = [record.prompt for record in prompts]
        self.ids = [_encode(engine, record) for record in prompts]
        self.temperatures = tuple(temperatures)
        self.batches = tuple(batches)
        self.repeats = repeats
        self.seed = seed
        self.adapter = adapter
        self._sampling = changed(sampling or {})
        self._request = dict(sampling or {})
        self._request |= {"max_tokens": max_tokens, "ignore_eos": ignore_eos}
        self._entropies = entropies
        self._known_entropies: dict[tuple[int, tuple[int, ...]], list[float]] = {}
        self._device = torch.device(getattr(engine.model, "device", "cpu"))
        self._by_token = turns == "token" and self._device.type != "cuda"

    @property
    def total(self) -> int:
        """Number of generations in all."""
        turns = self.repeats * len(self.ids) * len(self.batches) * len(self.temperatures)
        return turns * (len(self.configurations) + len(self.peers))

    @property
    def stage(self) -> Stage:
        """What the peers are started with."""
        longest = max(map(len, self.ids)) + self._request["max_tokens"]
        return Stage(self.engine, min(longest, self.engine.model.context_length))

    def turns(self) -> Iterator[Turn]:
        """All turns. The order within one depends on the seed and the turn alone."""
        for repeat in range(self.repeats):
            for prompt in range(len(self.ids)):
                for batch in self.batches:
                    if prompt % batch:
                        continue  # decoded beside an earlier one
                    for temperature in self.temperatures:
                        chance = Random(f"{self.seed} {repeat} {prompt} {batch} {temperature}")
                        order: list[Configuration | Peer] = [*self.configurations, *self.peers]
                        chance.shuffle(order)
                        others = range(prompt + 1, prompt + batch)
                        beside = tuple(n for n in others if n < len(self.ids))
                        fillers = tuple(n % len(self.ids) for n in others if n >= len(self.ids))
                        yield Turn(
                            repeat, prompt, batch, temperature, tuple(order), beside, fillers
                        )

    def warm_up(self) -> None:
        """Run every configuration once at every temperature, unrecorded.

        Drafters are loaded and programs compiled here, so that no timing has them in it; and a
        configuration that cannot run is told of before anything is measured.
        """
        short = min(_WARM_UP_TOKENS, self._request["max_tokens"])
        for temperature in self.temperatures:
            for configuration in self.configurations:
                self._stream(configuration, 0, temperature, max_tokens=short).output  # noqa: B018
            for peer in self.peers:
                peer.answer(self._ask(0, temperature, short))

    def about(self) -> dict[str, Any]:
        """What is known of the target and of what each configuration holds in memory."""
        drafts = {
            one.label: tensor_bytes(self.engine.make_drafter(one.drafter), beside=self.engine.model)
            for one in self.configurations
        }
        weights = tensor_bytes(self.engine.model)
        told = model_conditions(self.engine) | {"weights_bytes": weights, "draft_bytes": drafts}
        if self.peers:
            told["peers"] = {peer.label: peer.about() for peer in self.peers}
        return told

    def run(
        self, done: Collection[Key] = (), prompts: Collection[int] | None = None
    ) -> Iterator[Record]:
        """Measure, and give out each generation as it is finished.

        Parameters
        ----------
        done
            Keys of records that there are already, of an earlier run; they are left out.
        prompts
            Numbers of those to measure; all by default. Such as share a batch go together.
        """
        for turn in self.turns():
            if prompts is not None and turn.prompt not in prompts:
                continue
            wanted = [
                (order, one)
                for order, one in enumerate(turn.order)
                if any(key not in done for key in self._keys(one, turn))
            ]
            for group in self._groups(wanted):
                made = self._measure(group, turn)
                for (_, one), records in zip(group, made, strict=True):
                    for key, record in zip(self._keys(one, turn), records, strict=True):
                        if key not in done:
                            yield record

    def _keys(self, one: Configuration | Peer, turn: Turn) -> list[Key]:
        return [
            (one.label, n, turn.repeat, turn.batch, turn.temperature, self.adapter)
            for n in turn.prompts
        ]

    def _groups(
        self, wanted: Sequence[tuple[int, Configuration | Peer]]
    ) -> list[list[tuple[int, Configuration | Peer]]]:
        """Those that take turns by token, and each of the others, in the turn's order."""
        together = [one for one in wanted if self._by_token and isinstance(one[1], Configuration)]
        groups = [[one] for one in wanted if one not in together]
        return sorted([together, *groups] if together else groups, key=lambda group: group[0][0])

    def measure(self, configuration: Configuration, prompt: int, temperature: float) -> Record:
        """One generation, outside the turns."""
        ((record,),) = self._measure([(0, configuration)], Turn(0, prompt, 1, temperature, ()))
        return record

    def _measure(
        self, group: Sequence[tuple[int, Configuration | Peer]], turn: Turn
    ) -> list[list[Record]]:
        """Each one's records; several take turns by token."""
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        together = (*turn.prompts, *turn.fillers)
        lanes = []
        for order, one in group:
            if not isinstance(one, Configuration):
                return [self._measure_peer(one, turn, order)]
            streams = [self._stream(one, n, turn.temperature) for n in together]
            lanes.append(_Lane(one, order, streams))
        running = [lane.decode(self.engine.model) for lane in lanes]
        while running:
            running = [steps for steps in running if next(steps, _OVER) is not _OVER]
        peak = peak_bytes(self._device)
        return [self._records(lane, turn, peak) for lane in lanes]

    def _records(self, lane: _Lane, turn: Turn, peak: int | None) -> list[Record]:
        records = []
        for n, stream in zip(turn.prompts, lane.streams, strict=False):  # no fillers
            output, cache = stream.output, stream.session.cache
            held = cache_bytes(cache)
            records.append(
                Record.of(
                    output,
                    configuration=lane.configuration.label,
                    prompt=n,
                    kind=self.kinds[n],
                    repeat=turn.repeat,
                    batch=turn.batch,
                    temperature=turn.temperature,
                    pieces=lane.texts[id(stream)],
                    entropies=self._entropies_of(n, output.token_ids, cache),
                    adapter=self.adapter,
                    order=lane.order,
                    cache_bytes=held,
                    peak_bytes=peak,
                )
            )
        return records

    def _measure_peer(self, peer: Peer, turn: Turn, order: int) -> list[Record]:
        ask = self._ask(turn.prompt, turn.temperature, self._request["max_tokens"])
        found: dict[str, Any]
        try:
            reply = peer.answer(ask)
        except Exception as error:  # a peer's fault must not end the run, whatever it raises
            found = {"token_ids": [], "finish_reason": "failed", "failure": first_line(error)}
        else:
            found = {
                "token_ids": list(reply.token_ids),
                "finish_reason": reply.finish_reason,
                "text": reply.text,
                "tokens": reply.tokens,
                "counted": reply.counted,
                "ttft_s": reply.ttft_s,
                "total_s": reply.total_s,
            }
        record = Record(
            configuration=peer.label,
            prompt=turn.prompt,
            kind=self.kinds[turn.prompt],
            repeat=turn.repeat,
            batch=turn.batch,
            temperature=turn.temperature,
            seed=ask.seed,
            prompt_tokens=len(ask.ids),
            origins="",
            adapter=self.adapter,
            order=order,
            peer=True,
            **found,
        )
        return [record]

    def _ask(self, prompt: int, temperature: float, max_tokens: int) -> Ask:
        ids = self.ids[prompt]
        return Ask(
            ids=ids,
            prompt=self.prompts[prompt],
            max_tokens=min(max_tokens, self.engine.model.context_length - len(ids)),
            temperature=temperature,
            seed=self._seed(prompt),
            ignore_eos=self._request["ignore_eos"],
            sampling=self._sampling,
        )

    def _seed(self, prompt: int) -> int:
        return (self.seed + prompt) % _SEEDS

    def _stream(
        self, configuration: Configuration, prompt: int, temperature: float, **options: Any
    ) -> Any:
        request = self._request | {"temperature": temperature, **options}
        return self.engine.stream(
            self.ids[prompt],
            seed=self._seed(prompt),
            drafter=configuration.drafter,
            rule=configuration.rule,
            draft_length=configuration.draft_length,
            **request,
        )

    def _entropies_of(self, prompt: int, output: Sequence[int], cache: Any) -> list[float]:
        """Once for each text: exact configurations mostly write the same."""
        if not self._entropies:
            return []
        key = prompt, tuple(output)
        if key not in self._known_entropies:
            found = token_entropies(self.engine.model, self.ids[prompt], output, cache)
            self._known_entropies[key] = [round(value, 4) for value in found]
        return self._known_entropies[key]


def _encode(engine: Engine, record: PromptRecord) -> list[int]:
    prompt = record.prompt
    words = engine.tokenizer
    if isinstance(prompt, str) and words is not None and words.has_chat_template:
        prompt = [{"role": "user", "content": prompt}]
    try:
        ids = engine.encode(prompt)
    except PromptError as error:
        raise PromptError(f"Prompt '{record.id}': {error.problem}", hint=error.hint) from error
    if len(ids) >= (room := engine.model.context_length):
        raise PromptError(
            f"Prompt '{record.id}' has {len(ids)} tokens; the context of '{engine.model.name}' "
            f"holds {room}, and at least one must be left for the answer.",
            hint="Leave it out, or shorten it.",
        )
    return ids

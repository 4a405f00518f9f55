"""The server's one thread: places, the queue, memory, who leaves, and what fails."""

from __future__ import annotations

import threading
import time
import tracemalloc

import pytest
import torch

from outrider import Engine
from outrider.core.chooser import SeededChooser
from outrider.core.proposal import Proposal
from outrider.core.trace import Round
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.mixed import MixedDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.errors import NumericalError
from outrider.lab.memory import tensor_bytes
from outrider.models.hf import HFModel
from outrider.models.tokenizer import ToyTokenizer
from outrider.models.toy import ToyModel
from outrider.protocols import TappedModel
from outrider.serve.app import Service
from outrider.serve.guard import Guard
from outrider.serve.logprobs import Words, for_completion, token_logprobs
from outrider.serve.metrics import Metrics
from outrider.serve.orders import Order, cache_bytes
from outrider.serve.refusals import RefusalError
from outrider.serve.scheduler import Done, Failed, Scheduler, Tokens
from outrider.serve.schema import CompletionRequest
from tests.small_models import module, native, new_module, on_device, some_tokens
from tests.unit.test_eagle import head_module

V = 6
WAIT_S = 60


class Inbox:
    """What the scheduler told."""

    def __init__(self):
        self.events = []
        self._news = threading.Condition()

    def __call__(self, index, event):
        with self._news:
            self.events.append((index, event))
            self._news.notify_all()

    def wait(self, count=1, kind=(Done, Failed)):
        """The first ``count`` events of a kind, by output."""
        with self._news:
            done = self._news.wait_for(lambda: len(self.of(kind)) >= count, WAIT_S)
            assert done, self.events
        return self.of(kind)

    def of(self, kind):
        return [(index, event) for index, event in self.events if isinstance(event, kind)]


def slow(seconds=0.01, **spoil) -> Engine:
    """A toy whose passes take time, so that a request can be met in the middle."""
    model = ToyModel.random(V, 1)
    score = model.score

    def later(cache, tokens, proposal):
        time.sleep(seconds)
        rows = score(cache, tokens, proposal)
        return rows * torch.nan if cache.tokens[0] == spoil.get("nan") else rows

    model.score = later
    return Engine(model, ToyTokenizer(V), drafter="none")


@pytest.fixture
def running():
    """Starts schedulers, and ends them."""
    made = []

    def start(engine, **options):
        scheduler = Scheduler(engine, Metrics("toy"), **options)
        scheduler.start()
        made.append(scheduler)
        return scheduler

    yield start
    for scheduler in made:
        scheduler.stop()


def value(scheduler, name, **labels):
    return scheduler.metrics.registry.get_sample_value(name, labels)


def ids(inbox):
    return {index: event.output.token_ids for index, event in inbox.wait()}


# --- what comes out ------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
def test_outputs_are_the_same_bits_alone_and_in_company(running):
    engine = Engine(native(module("llama")), drafter="ngram")
    how = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 1.0, "rule": "rejection", "drafter": "early_exit:1"},
        {"temperature": 1.0, "rule": "block"},
        {"temperature": 0.7, "plain": True, "frequency_penalty": 0.5},
    ]
    orders = [
        Order(
            some_tokens(4 + 9 * i, i),
            {"max_tokens": 12, "seed": i, "ignore_eos": True, **how[i % 5]},
            top_logprobs=2,
        )
        for i in range(10)
    ]
    scheduler = running(engine, max_batch=4)

    def told(inbox):
        (end,) = [event for _, event in inbox.of(Done)]
        rows = [row for _, event in inbox.of(Tokens) for row in event.logprobs]
        return end.output.token_ids, rows

    alone = []
    for order in orders:
        inbox = Inbox()
        scheduler.submit([order], inbox)
        inbox.wait()
        alone.append(told(inbox))
    inboxes = [Inbox() for _ in orders]
    for order, inbox in zip(orders, inboxes, strict=True):
        scheduler.submit([order], inbox)
    for inbox in inboxes:
        inbox.wait()
    together = [told(inbox) for inbox in inboxes]
    assert together == alone
    library = [engine.generate(o.prompt, **o.options).token_ids for o in orders]
    assert [tokens for tokens, _ in together] == library


def test_outputs_to_one_prompt_have_chance_of_their_own(running):
    engine = slow(0)
    options = {"max_tokens": 12, "seed": 7, "temperature": 1.0}
    scheduler, inbox = running(engine), Inbox()
    scheduler.submit([Order([0, 1], options, k) for k in range(3)], inbox)
    inbox.wait(3)
    found = ids(inbox)
    assert found[0] == engine.generate([0, 1], **options).token_ids
    assert found[0] != found[1] != found[2] != found[0]
    third = engine.stream([0, 1], **options)
    third.session.chooser = SeededChooser(7, 2)
    assert found[2] == third.output.token_ids


def test_logprobs_are_the_models_own(running):
    engine = slow(0)
    scheduler, inbox = running(engine), Inbox()
    options = {"max_tokens": 5, "seed": 1, "temperature": 0.3, "drafter": "ngram", "top_k": 1}
    scheduler.submit([Order([0, 1, 0, 1], options, top_logprobs=V)], inbox)
    tokens = ids(inbox)  # waits
    found = [row for _, event in inbox.of(Tokens) for row in event.logprobs]
    text = [0, 1, 0, 1]
    for token, row in zip(tokens[0], found, strict=True):
        law = engine.model.next(text)
        assert row.token_id == token
        assert row.logprob == pytest.approx(float(torch.tensor(law).log()[token]))
        assert [i for i, _ in row.top] == sorted(range(V), key=lambda i: -law[i])
        text.append(token)


def test_a_token_that_cannot_come_has_a_logprob_that_json_can_say():
    row = torch.tensor([0.0, -torch.inf, 1.0])
    found = token_logprobs(row, 1, top=3)
    assert found.logprob == -9999.0
    assert found.top[-1] == (1, -9999.0)
    told = for_completion([found, token_logprobs(row, 2, 0)], Words(ToyTokenizer(3)), offset=4)
    assert told["tokens"] == ["b", "c"]
    assert told["text_offset"] == [4, 5]


# --- places, the queue, memory -------------------------------------------------------------------


def test_places_and_queue_are_bounded(running):
    scheduler = running(slow(), max_batch=2, queue=1)
    order, inboxes = Order([1, 2], {"max_tokens": 60}), [Inbox() for _ in range(3)]
    jobs = [scheduler.submit([order], inbox) for inbox in inboxes]
    with pytest.raises(RefusalError, match="2 places") as caught:
        scheduler.submit([order], Inbox())
    assert caught.value.status == 429
    assert 1 <= int(caught.value.headers["Retry-After"]) <= 60
    assert value(scheduler, "outrider_queue_full_total") == 1
    inboxes[1].wait(1, Tokens)
    assert not inboxes[2].events  # it waits
    scheduler.cancel(jobs[2])
    jobs.append(scheduler.submit([order], Inbox()))  # in its stead
    assert value(scheduler, "outrider_running") == 2
    for job in jobs:
        scheduler.cancel(job)


def test_a_request_of_many_outputs_takes_turns_with_itself(running):
    scheduler, inbox = running(slow(0), max_batch=2, queue=0), Inbox()
    scheduler.submit([Order([1], {"max_tokens": 4}, k) for k in range(5)], inbox)
    assert sorted(index for index, _ in inbox.wait(5)) == [0, 1, 2, 3, 4]


def test_caches_that_do_not_fit_side_by_side_take_turns(running):
    scheduler, inbox = running(slow(), max_batch=4, cache_bytes=100), Inbox()
    orders = [Order([1], {"max_tokens": 8}, k, cache_bytes=60) for k in range(3)]
    scheduler.submit(orders, inbox)
    inbox.wait(3)
    order = [index for index, event in inbox.events if isinstance(event, Tokens)]
    assert order == sorted(order)  # one after the other


def a_head(target):
    return EagleDrafter(target.make_head(head_module()), target)


def a_mixture(target):
    return MixedDrafter([SuffixDrafter(), a_head(target)])


TARGETS = {
    "native": lambda: native(new_module("llama")),
    "hf": lambda: HFModel(new_module("llama")),
    "device": lambda: on_device(new_module("llama")),
}
DRAFTS = {
    "none": lambda target: NoDrafter(),
    "native model": lambda target: ModelDrafter(native(new_module("qwen2"))),
    "hf model": lambda target: ModelDrafter(HFModel(new_module("gpt2", n_positions=1024))),
    "head": a_head,
    "mixture": a_mixture,
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("target", TARGETS)
def test_what_an_output_takes_is_known_before(target, draft):
    engine = Engine(TARGETS[target](), drafter="none")
    if draft in ("head", "mixture") and not isinstance(engine.model, TappedModel):
        pytest.skip("it gives out no hidden states")
    drafter = DRAFTS[draft](engine.model)
    prompt, more = some_tokens(600), 60
    generation = engine.stream(
        prompt, drafter=drafter, draft_length=3, max_tokens=more, seed=1, ignore_eos=True
    )
    session = generation.session
    assert len(generation.output.token_ids) == more
    taken = tensor_bytes([session.cache, *_own_caches(session.draft)])
    known = cache_bytes(engine, [drafter], len(prompt) + more)
    index = SuffixDrafter().cache_bytes(len(prompt) + more) if draft == "mixture" else 0
    # A native cache has a table of addresses besides, 8 bytes for 64 tokens.
    assert taken <= 1.01 * (known - index) <= 2.5 * taken


def _own_caches(session):
    parts = getattr(session, "_sessions", [session])
    return [part._cache for part in parts if hasattr(part, "_cache")]


def test_an_index_takes_no_more_than_it_says():
    tokens = some_tokens(4000)
    tracemalloc.start()
    session = SuffixDrafter().start(tokens, 4000)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert session is not None
    assert taken < SuffixDrafter().cache_bytes(len(tokens))


def test_plain_requests_are_not_charged_for_a_draft():
    service = Service(Engine(TARGETS["native"](), drafter=DRAFTS["hf model"](None)), "m")
    ask = CompletionRequest(model="m", prompt=[1, 2, 3], max_tokens=100)
    plain = ask.model_copy(update={"speculation": False})
    (drafted,), (alone,) = map(service.intake.orders, (ask, plain))
    assert alone.cache_bytes == service.engine.model.shape.bytes(103)
    draft = service.engine.drafter.model
    assert drafted.cache_bytes == alone.cache_bytes + draft.cache_bytes(103)


def test_who_leaves_is_gone_before_the_next_round(running):
    scheduler, inbox = running(slow(), max_batch=1), Inbox()
    job = scheduler.submit([Order([1], {"max_tokens": 2000})], inbox)
    inbox.wait(2, Tokens)
    scheduler.cancel(job)
    told = len(inbox.events)
    after = Inbox()
    scheduler.submit([Order([1], {"max_tokens": 3})], after)
    assert len(ids(after)[0]) == 3
    assert len(inbox.events) <= told + 1
    assert not inbox.of(Done)


def test_the_end_waits_for_those_who_run_and_takes_nobody_else(running):
    scheduler, inbox = running(slow()), Inbox()
    scheduler.submit([Order([1], {"max_tokens": 10})], inbox)
    scheduler.drain()
    with pytest.raises(RefusalError) as caught:
        scheduler.submit([Order([1], {"max_tokens": 1})], Inbox())
    assert caught.value.status == 503
    scheduler.stop(wait=True)
    assert len(ids(inbox)[0]) == 10
    assert not scheduler.alive


def test_an_end_at_once_is_told(running):
    scheduler, inbox = running(slow(), max_batch=1), Inbox()
    scheduler.submit([Order([1], {"max_tokens": 2000}, k) for k in range(2)], inbox)
    inbox.wait(1, Tokens)
    scheduler.stop()
    assert [event.error.status for _, event in inbox.wait(2)] == [503, 503]


# --- what fails ----------------------------------------------------------------------------------


class Breaks(NoDrafter):
    """Fails in its third round; or at once, or with nonsense."""

    name, default_length = "breaks", 2

    def __init__(self, how):
        self.how, self.rounds = how, 0

    def start(self, prompt, capacity):
        if self.how == "start":
            raise RuntimeError("cannot start")
        return self

    def propose(self, tokens, length, pick):
        self.rounds += 1
        if self.rounds < 3:
            return Proposal.chain([tokens[-1]][:length])
        if self.how == "raise":
            raise ZeroDivisionError
        if self.how == "none":
            return None
        return Proposal.chain([V] if self.how == "beyond" else [0] * (length + 1))


@pytest.mark.parametrize("how", ["start", "raise", "none", "beyond", "too long"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_fails_costs_no_token(running, how, temperature):
    engine = slow(0)
    options = {"max_tokens": 12, "seed": 3, "temperature": temperature}
    expected = engine.generate([0, 1], plain=True, **options).token_ids
    scheduler, inbox, other = running(engine), Inbox(), Inbox()
    scheduler.submit([Order([0, 1], {**options, "drafter": Breaks(how)})], inbox)
    scheduler.submit([Order([0, 1], {**options, "drafter": "ngram"})], other)
    ((_, done),) = inbox.wait()
    assert done.drafter_failed
    assert done.output.token_ids == expected
    assert [r.drafted for r in done.output.trace.rounds[3:]] == [0] * (
        len(done.output.trace.rounds) - 3
    )
    ((_, good),) = other.wait()
    assert good.output.token_ids == expected
    assert not good.drafter_failed
    assert value(scheduler, "outrider_drafter_failures_total") == 1


@pytest.mark.usefixtures("one_thread")
def test_a_drafter_that_fails_on_the_targets_own_cache_leaves_it_right(running):
    engine = Engine(native(module("llama")), drafter="none")
    options = {"max_tokens": 10, "seed": 3, "ignore_eos": True}
    prompt = some_tokens(9)
    expected = engine.generate(prompt, **options).token_ids
    generation = engine.stream(prompt, drafter="early_exit:1", **options)
    session, failures = generation.session, []
    inner = session.draft

    class Halfway:
        def propose(self, tokens, length, pick):
            if len(tokens) < len(prompt) + 4:
                return inner.propose(tokens, length, pick)
            engine.model.prefill(session.cache, [5, 6, 7], None)
            raise RuntimeError("halfway")

    session.draft = Guard(Halfway(), session.cache, 64, failures.append)
    assert generation.output.token_ids == expected
    assert [str(error) for error in failures] == ["halfway"]


def test_logits_that_are_no_numbers_end_one_output(running):
    scheduler, bad, good = running(slow(0, nan=4)), Inbox(), Inbox()
    scheduler.submit([Order([4, 1], {"max_tokens": 3})], bad)
    scheduler.submit([Order([2, 1], {"max_tokens": 3})], good)
    ((_, failed),) = bad.wait()
    assert isinstance(failed.error, NumericalError)
    assert len(ids(good)[0]) == 3
    assert value(scheduler, "outrider_numerical_errors_total") == 1


def test_a_pass_that_fails_ends_those_in_it_and_not_the_server(running):
    engine = slow(0)
    scheduler = running(engine)
    score, engine.model.score = engine.model.score, None
    inbox = Inbox()
    scheduler.submit([Order([1], {"max_tokens": 3})], inbox)
    assert isinstance(inbox.wait()[0][1], Failed)
    engine.model.score = score
    after = Inbox()
    scheduler.submit([Order([1], {"max_tokens": 3})], after)
    assert len(ids(after)[0]) == 3


# --- counters ------------------------------------------------------------------------------------


def test_counters_add_up():
    metrics = Metrics("m")
    for one in (
        Round(4, 2, 1, 0, True, 0, 0, 0),
        Round(3, 3, 0, 1, False, 0, 0, 0),
        Round(0, 0, 0, 1, False, 0, 0, 0),
    ):
        metrics.round(one)
    read = metrics.registry.get_sample_value
    name = {"model_name": "m"}
    assert read("vllm:spec_decode_num_drafts_total", name) == 2
    assert read("vllm:spec_decode_num_draft_tokens_total", name) == 7
    assert read("vllm:spec_decode_num_accepted_tokens_total", name) == 5
    by_place = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [read(by_place, name | {"position": str(i)}) for i in range(4)] == [2, 2, 1, None]
    emitted = "outrider_emitted_tokens_total"
    kinds = ("accepted", "correction", "bonus", "plain")
    assert [read(emitted, {"kind": kind}) for kind in kinds] == [5, 1, 1, 1]
    assert read("outrider_target_calls_total") == 3

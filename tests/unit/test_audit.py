"""Audits of production rules and of programs that are wrong on purpose, both ways."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from outrider import Engine
from outrider.audit import exact
from outrider.audit.exact import (
    LIMIT,
    TOLERANCE,
    audit_exact,
    chain_law,
    exact_law,
    largest_difference,
)
from outrider.audit.remembered import Remembered
from outrider.audit.sampled import Samples, audit_samples, audit_tokens, outputs_needed
from outrider.core.processors import Sampling
from outrider.core.race import MOST
from outrider.drafters.model import ModelDrafter
from outrider.errors import RollbackError, UsageError
from outrider.models.hf import HFModel
from outrider.models.tokenizer import ToyTokenizer
from outrider.models.toy import ToyModel
from outrider.protocols import Drafter
from outrider.registry import RULES
from outrider.rules.rejection import Rejection
from tests.controls import (
    BlockTestsByWeight,
    BonusFromTheRowBefore,
    CallsArgmaxASample,
    CoarseEpsilon,
    DropsDoubtfulDrafts,
    EpsilonRatio,
    KeepsLikelyDrafts,
    NoResidual,
    RepairsOnFreshNoise,
    ReportsRawQ,
    SharedNoise,
    SlipsUp,
    SwappedResidual,
    TiesToTheLast,
)
from tests.small_models import module, native, some_tokens

PROMPT = [0, 1, 0]
SAMPLED = [n for n in RULES if RULES.load(n).exact and n not in ("greedy", "coupled")]


def toy_drafter(vocab: int) -> ModelDrafter:
    """Far enough from the target that every fault below moves the law by some per cent."""
    return ModelDrafter(ToyModel.random(vocab, 37, sharpness=2.0))


TOP_P = Sampling(temperature=1.0, top_p=0.7)
HOT = Sampling(temperature=1.0)
CONTROLS = {
    "repairs from p": (NoResidual, None, HOT),
    "repairs from q - p": (SwappedResidual, None, HOT),
    "noise shared": (SharedNoise, None, HOT),
    "low-q draft dropped": (Rejection, DropsDoubtfulDrafts, HOT),
    "bonus from the wrong row": (BonusFromTheRowBefore, None, HOT),
    "epsilon in the ratio": (CoarseEpsilon, None, HOT),
    "raw q after top-p": (Rejection, ReportsRawQ, TOP_P),
    "argmax as a sample": (CallsArgmaxASample, None, HOT),
}


def engine_for(rule, wrap=None, vocab=8, draft_length=2):
    drafter: Drafter = toy_drafter(vocab)
    return Engine(
        ToyModel.random(vocab, 1, sharpness=1.0),
        ToyTokenizer(vocab),
        drafter=wrap(drafter) if wrap else drafter,
        rule=rule,
        draft_length=draft_length,
    )


def request(sampling, max_tokens=3):
    return {"max_tokens": max_tokens, **sampling.to_dict()}


@pytest.mark.parametrize("name", [n for n in RULES if RULES.load(n).exact])
def test_every_exact_rule_is_consistent_by_enumeration(name):
    sampling = Sampling(temperature=0.0 if name == "greedy" else 1.0, top_p=0.9)
    engine = engine_for(name, vocab=3)
    report = audit_exact(engine, [[0], PROMPT], max_tokens=3, sampling=sampling)
    assert report.verdict == "consistent"
    assert report.largest_difference <= TOLERANCE
    assert report.courses >= report.outputs >= 2
    assert report.to_dict()["method"] == "enumeration"


@pytest.mark.parametrize("name", CONTROLS)
def test_a_fault_is_caught_by_enumeration(name):
    rule, wrap, sampling = CONTROLS[name]
    report = audit_exact(engine_for(rule(), wrap, 3), [PROMPT], max_tokens=3, sampling=sampling)
    assert report.verdict == "different"
    if name == "noise shared":
        assert "Noise was used twice" in report.broken
    else:
        assert report.largest_difference > 1e-3
        assert report.total_variation >= report.largest_difference
        _, tokens, plain, ours = report.worst
        assert len(tokens) == 3
        assert abs(plain - ours) == report.largest_difference


@pytest.mark.parametrize("name", [n for n in RULES if RULES.load(n).exact])
@pytest.mark.parametrize("stop", [["b"], ["ab", "ca"]])
def test_stop_strings_are_walked_too(name, stop):
    """They end an output inside a block; the law of what came before is the chain rule's."""
    sampling = Sampling(temperature=0.0 if name == "greedy" else 1.0)
    report = audit_exact(
        engine_for(name, vocab=3), [PROMPT], max_tokens=3, sampling=sampling, stop=stop
    )
    assert report.verdict == "consistent"
    assert name == "greedy" or any(len(o.token_ids) < 3 for o in report.laws)


def test_laws_and_their_difference():
    target = ToyModel.random(3, 2)
    wanted = chain_law(target, max_tokens=2)
    made = exact_law(target, toy_drafter(3), Rejection(), max_tokens=2)
    assert sum(wanted.values()) == pytest.approx(1.0, abs=TOLERANCE)
    assert largest_difference(made, wanted) <= TOLERANCE
    assert largest_difference({}, wanted) == max(wanted.values())


def test_what_is_too_large_to_walk_is_refused():
    with pytest.raises(UsageError, match=f"4096 outputs; at most {LIMIT}"):
        audit_exact(engine_for("rejection"), [PROMPT], max_tokens=4, sampling=HOT)


# --- enumeration of a target that is no toy ------------------------------------------------------

FEW = Sampling(temperature=1.0, top_k=2)


def _askew(target):
    """A draft that thinks less of every other token than its target does."""

    def law(tokens):
        weights = target.next(tokens) * (1 - 0.6 * (np.arange(target.vocab_size) % 2))
        return weights / weights.sum()

    return ToyModel(law, target.vocab_size)


def remembering(rule, vocab=3):
    """A toy that enumeration does not know for one."""
    engine = engine_for(rule, vocab=vocab)
    if vocab > 8:  # where two laws of chance have no likely token in common
        engine.drafter = ModelDrafter(_askew(engine.model))
    engine.model = Remembered(engine.model)
    return engine


@pytest.mark.parametrize("name", [n for n in RULES if RULES.load(n).exact])
def test_a_remembered_toys_laws_are_the_toys_to_the_bit(name):
    sampling = Sampling(temperature=0.0 if name == "greedy" else 1.0)
    found, wanted = (
        audit_exact(engine, [[0], PROMPT], max_tokens=3, sampling=sampling)
        for engine in (remembering(name), engine_for(name, vocab=3))
    )
    assert found.laws == wanted.laws
    assert (found.courses, found.outputs) == (wanted.courses, wanted.outputs)
    assert found.largest_difference == wanted.largest_difference <= TOLERANCE
    assert (found.remembered, found.to_dict()["remembered"], found.target) == (True, True, "toy-1")
    assert "remembered" not in wanted.to_dict()


@pytest.mark.parametrize("name", ["rejection", "block", "coupled"])
def test_a_large_vocabulary_is_walked_where_few_tokens_can_come(name):
    """300 ** 3 outputs would be too many for a toy; of these, 8 are possible."""
    report = audit_exact(remembering(name, vocab=300), [PROMPT], max_tokens=3, sampling=FEW)
    assert report.verdict == "consistent"
    assert report.outputs == 8 < report.courses
    assert report.drafted_tokens > 0


def test_draws_on_one_noise_are_walked_among_the_tokens_that_can_come():
    """Left out or not, a token that no draw can give changes nothing."""
    engines = engine_for("coupled", vocab=4), remembering("coupled", vocab=4)
    toy, found = (audit_exact(engine, [PROMPT], max_tokens=3, sampling=FEW) for engine in engines)
    assert found.courses == toy.courses
    for one, other in zip(found.laws, toy.laws, strict=True):
        assert one.token_ids == other.token_ids
        assert one.speculative_probability == pytest.approx(
            other.speculative_probability, abs=TOLERANCE
        )


@pytest.mark.parametrize("rule", [NoResidual, CoarseEpsilon, EpsilonRatio, BlockTestsByWeight])
def test_a_fault_is_caught_where_the_target_is_no_toy(rule):
    engine = remembering(rule(), vocab=300)
    report = audit_exact(engine, [PROMPT], max_tokens=3, sampling=FEW)
    assert report.verdict == "different"
    assert 1e-9 < report.largest_difference == report.worst.gap


def test_a_fault_in_shared_noise_is_caught_where_the_target_is_no_toy():
    for rule in (KeepsLikelyDrafts(), RepairsOnFreshNoise()):
        report = audit_exact(remembering(rule, 300), [PROMPT], max_tokens=3, sampling=FEW)
        assert report.largest_difference > 1e-3
    report = audit_exact(remembering(SharedNoise(), 300), [PROMPT], max_tokens=3, sampling=FEW)
    assert (report.verdict, report.remembered) == ("different", True)
    assert "Noise was used twice" in report.broken


def test_a_model_that_is_not_remembered_is_so_for_the_walk_alone(one_thread, monkeypatch):
    model = HFModel(module("llama"))
    fed = []
    score = model.score
    monkeypatch.setattr(model, "score", lambda *asked: fed.append(0) or score(*asked))
    engine = Engine(model, drafter=toy_drafter(model.vocab_size), rule="rejection")
    report = audit_exact(engine, [some_tokens(5)], max_tokens=3, sampling=FEW)
    assert (report.verdict, report.remembered, report.outputs) == ("consistent", True, 8)
    assert engine.model is model
    assert report.drafted_tokens > 0
    assert 7 <= len(fed) < report.courses  # the contexts that can come, and those that are drafted


def test_a_cache_that_cannot_forget_a_suffix_is_refused(one_thread):
    engine = Engine(HFModel(module("mamba")), rule="rejection")
    with pytest.raises(RollbackError, match="does not roll back by length"):
        audit_exact(engine, [some_tokens(5)], max_tokens=2, sampling=FEW)


@pytest.mark.parametrize("drafter", ["early_exit:1", "suffix+early_exit:1"])
def test_a_drafter_on_the_targets_own_cache_is_refused(one_thread, drafter):
    engine = Engine(native(module("llama")), drafter=drafter, rule="rejection")
    with pytest.raises(UsageError, match="drafts on the target's own cache"):
        audit_exact(engine, [some_tokens(5)], max_tokens=2, sampling=FEW)


def test_too_many_possible_outputs_are_told_with_the_token_that_they_were_reached_at(monkeypatch):
    request_ = {"max_tokens": 3, "sampling": Sampling(temperature=1.0, top_k=4)}
    monkeypatch.setattr(exact, "OUTPUTS", 64)
    audit_exact(remembering("rejection", vocab=40), [PROMPT], **request_)
    monkeypatch.setattr(exact, "OUTPUTS", 63)
    words = r"Prompt 1: More than 63 outputs .*: 64 were reached at token 3 of 3\..*--top-k"
    with pytest.raises(UsageError, match=words):
        audit_exact(remembering("rejection", vocab=40), [PROMPT], **request_)
    with pytest.raises(UsageError, match=r": 80 were reached at token 2 of 2\."):
        audit_exact(remembering("rejection", vocab=40), [PROMPT], max_tokens=2, sampling=HOT)


def test_too_many_courses_are_told_with_how_far_the_walk_came(monkeypatch):
    sampling = Sampling(temperature=1.0, top_k=3)
    report = audit_exact(remembering("rejection", 40), [PROMPT], max_tokens=3, sampling=sampling)
    monkeypatch.setattr(exact, "COURSES", report.courses + 100)
    audit_exact(remembering("rejection", 40), [PROMPT], max_tokens=3, sampling=sampling)
    words = (
        rf"More than {report.courses + 100} courses .* prompt 2 of 2 .* of 0\.\d+ together.*--top-k"
    )
    with pytest.raises(UsageError, match=words):
        audit_exact(remembering("rejection", 40), [PROMPT, [0]], max_tokens=3, sampling=sampling)


def test_too_many_tokens_on_one_noise_are_told():
    sampling = Sampling(temperature=1.0, top_k=MOST + 1)
    with pytest.raises(UsageError, match=rf"on the same noise; at most {MOST}"):
        audit_exact(remembering("coupled", 40), [PROMPT], max_tokens=2, sampling=sampling)


def test_a_drafter_that_changes_from_course_to_course_is_told():
    """Without a word it would look like a fault of the rule."""
    engine = remembering("rejection")
    courses = iter(range(10**6))

    class Moody(ModelDrafter):
        def start(self, prompt, capacity):
            self.model = ToyModel.random(3, next(courses), sharpness=2.0)
            return super().start(prompt, capacity)

    engine.drafter = Moody(ToyModel.random(3, 37))
    with pytest.raises(UsageError, match="something besides chance changes"):
        audit_exact(engine, [PROMPT], max_tokens=2, sampling=HOT)


def test_progress_is_told_up_to_the_end():
    told = []
    audit_exact(
        remembering("rejection"), [[0], PROMPT], max_tokens=2, sampling=HOT,
        advance=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert told == sorted(told)
    assert told[-1] == (2000, 2000)


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("sampling", [HOT, TOP_P])
def test_every_sampled_rule_is_consistent_by_samples(name, sampling):
    """False alarms at alpha = 1e-3 a run; seeds are fixed, so a run that passed passes again."""
    report = audit_samples(engine_for(name), [PROMPT], 1500, seed=1, request=request(sampling, 2))
    assert report.verdict != "different"
    assert report.plain_samples == report.speculative_samples == 1500


@pytest.mark.parametrize("name", CONTROLS)
def test_a_fault_is_caught_by_samples(name):
    rule, wrap, sampling = CONTROLS[name]
    report = audit_samples(
        engine_for(rule(), wrap), [PROMPT], 2500, seed=1, request=request(sampling)
    )
    assert report.verdict == "different"
    assert report.worst.adjusted_p < 1e-3


def test_every_sample_has_a_seed_of_its_own_and_progress_is_told(monkeypatch):
    seeds = []
    stream = Engine.stream

    def watch(self, prompt, **options):
        seeds.append(options["seed"])
        return stream(self, prompt, **options)

    monkeypatch.setattr(Engine, "stream", watch)
    told = []
    samples = Samples(engine_for("rejection"), [PROMPT, [1]], seed=40, request=request(HOT))
    samples.draw(2)
    strata = samples.draw(5, lambda done, total: told.append((done, total)))
    assert sorted(seeds) == list(range(40, 60))
    assert told == [(i + 1, 20) for i in range(8, 20)]
    assert [len(s.plain) for s in strata] == [len(s.speculative) for s in strata] == [5, 5]


def test_a_sequential_audit_stops_when_it_knows():
    """Each look tests at its share of alpha, and the first that is not short of samples ends it."""
    rule, wrap, sampling = CONTROLS["repairs from q - p"]
    report = audit_samples(
        engine_for(rule(), wrap), [PROMPT], 3200, seed=1, request=request(sampling), looks=6
    )
    assert report.verdict == "different"
    assert report.plain_samples == report.looks[-1].samples < 3200
    assert [look.samples for look in report.looks] == [100 * 2**i for i in range(len(report.looks))]
    assert {look.verdict for look in report.looks[:-1]} <= {"not enough samples"}
    assert all(look.alpha == 1e-3 / 6 for look in report.looks)
    assert report.alpha == 1e-3
    honest = audit_samples(
        engine_for("rejection"), [PROMPT], 100, seed=1, request=request(HOT), looks=3
    )
    assert honest.verdict == "not enough samples"
    assert [look.samples for look in honest.looks] == [25, 50, 100]


# --- token by token ------------------------------------------------------------------------------


def test_equal_tokens_are_consistent_once_there_are_enough():
    engine = engine_for("coupled")
    few = audit_tokens(engine, [PROMPT], 5, seed=1, request=request(HOT))
    assert (few.verdict, few.needed) == ("not enough samples", outputs_needed())
    enough = audit_tokens(engine, [PROMPT], 32, seed=1, request=request(HOT))
    assert (enough.verdict, enough.needed, enough.differences) == ("consistent", None, ())
    assert enough.compared_tokens == 96


def test_greedy_decodes_each_prompt_once():
    engine = engine_for("greedy")
    report = audit_tokens(engine, [[0], [1]], 9, seed=1, request=request(Sampling(), 20))
    assert (report.verdict, report.compared) == ("consistent", 2)


def test_the_first_difference_is_located():
    report = audit_tokens(engine_for(SlipsUp()), [PROMPT], 40, seed=1, request=request(HOT, 6))
    assert report.verdict == "different"
    for d in report.differences:
        assert (d.plain_token, d.token) == (3, 4)
    assert any(not d.near_tie for d in report.differences)
    d = report.differences[0]
    engine = engine_for("coupled")
    plain = engine.generate(PROMPT, seed=d.seed, plain=True, **request(HOT, 6)).token_ids
    assert plain[d.position] == 3
    row = np.log(engine.model.next([*PROMPT, *plain[: d.position]]))
    assert d.pair_gap == pytest.approx(row[3] - row[4])


@pytest.mark.parametrize(("gap", "verdict"), [(0.0, "consistent"), (0.01, "different")])
def test_a_near_tie_is_told_from_a_real_difference(gap, verdict):
    logits = np.array([gap, 0.0, -3.0])
    law = np.exp(logits) / np.exp(logits).sum()
    engine = Engine(
        ToyModel(lambda tokens: law, 3), ToyTokenizer(3), rule=TiesToTheLast(),
        drafter=ModelDrafter(ToyModel.random(3, 9)), draft_length=2,
    )  # fmt: skip
    report = audit_tokens(
        engine, [PROMPT], 1, seed=1, request=request(Sampling(), 8), near_tie=1e-3
    )
    assert report.verdict == verdict
    (found,) = report.differences
    assert found.near_tie == (verdict == "consistent")
    assert found.top_2_gap == pytest.approx(gap)


def test_no_samples_are_a_mistake():
    for audit in (audit_samples, audit_tokens):
        with pytest.raises(UsageError, match="at least one sample"):
            audit(engine_for("coupled"), [PROMPT], 0, seed=1, request=request(HOT))


def test_a_missing_scipy_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.delitem(sys.modules, "outrider.audit.statistics")
    with pytest.raises(UsageError, match=r"pip install outrider\[audit\]"):
        __import__("outrider.audit.statistics")


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_default_model_shows_no_difference(smollm, rule):
    smollm.rule = rule
    ids = smollm.encode("The best thing about this town is")
    options = request(Sampling(temperature=0.5, top_p=0.9), 2)
    try:
        report = audit_samples(smollm, [ids], 40, seed=1, request=options)
    finally:
        smollm.rule = "auto"
    assert report.verdict != "different"

"""The adaptive policy and prices, on courses of events worked out by hand and simulated."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from outrider import Engine
from outrider.core.chooser import SeededChooser
from outrider.core.distribution import Distribution
from outrider.core.price import NOMINAL, Price
from outrider.core.proposal import Proposal
from outrider.drafters.model import ModelDrafter
from outrider.engine import pricing
from outrider.errors import SamplingError, UsageError
from outrider.models.tokenizer import ToyTokenizer
from outrider.models.toy import ToyModel
from outrider.policies import adaptive
from outrider.policies.adaptive import Adaptive
from outrider.policies.fixed import Fixed
from outrider.rules.coupled import Coupled
from outrider.rules.greedy import Greedy

FREE = Price((1, 2), (1.0, 1.0))
DEAR = Price((1, 2), (1.0, 1.5))


def chain(*confidence: float, source: str = "x") -> Proposal:
    return Proposal.chain(range(len(confidence)), confidence=confidence, source=source)


def test_a_price_goes_along_lines_and_never_down():
    price = Price.measured({4: 0.015, 1: 0.010, 2: 0.009, 8: 0.030})
    assert price.rows == (1, 2, 4, 8)
    assert [round(price.of(n), 6) for n in (1, 2, 3, 4, 6, 8, 12)] == [
        1.0, 1.0, 1.25, 1.5, 2.25, 3.0, 4.5,
    ]  # fmt: skip


def test_free_rows_are_all_taken_and_dear_ones_only_where_they_pay():
    assert len(Adaptive(8, FREE).trim(chain(0.9, 0.5, 0.1))) == 3
    # One pass gives 1.2 tokens at first, so a row of half a pass must add 0.6.
    assert len(Adaptive(8, DEAR).trim(chain(0.9, 0.7, 0.9))) == 2
    assert len(Adaptive(8, DEAR).trim(chain(0.5, 0.9))) == 0


def test_what_is_trimmed_of_a_tree_is_a_tree():
    tree = Proposal((1, 2, 3, 4), (-1, -1, 0, 1), (None,) * 4, (0.7, 0.2, 0.9, 0.9), "x")
    kept = Adaptive(8, Price((1, 2), (1.0, 1.3))).trim(tree)
    assert (kept.tokens, kept.parents, kept.confidence) == ((1, 3), (-1, 0), (0.7, 0.9))


def test_drawn_tokens_are_never_left_out():
    laws = [Distribution.one_hot(0, 3), None]
    drawn = Proposal.chain([0, 1], laws, confidence=[0.01, 0.01])
    assert Adaptive(8, DEAR).trim(drawn) is drawn


def test_without_confidence_all_is_scored():
    bare = Proposal.chain([1, 2, 3])
    assert Adaptive(8, DEAR).trim(bare) is bare


def test_overconfident_drafts_are_found_out_and_tried_again():
    policy = Adaptive(8, Price((1, 2), (1.0, 1.2)), retry=3)
    kept = []
    for _ in range(60):
        proposal = policy.trim(chain(0.85, 0.85))
        kept.append(len(proposal))
        policy.learn(proposal, [])
    assert kept[0] == 2
    # Attempts in vain come 3, 6, 12 and from then on 12 rounds apart.
    tried = [i for i, n in enumerate(kept) if n == 1][-4:]
    assert all(kept[i] == 0 for i in range(tried[0] + 1, tried[1]))
    assert tried[-1] - tried[-2] == 13
    assert set(kept[tried[0] :]) == {0, 1}


def test_patience_starts_afresh_when_drafts_pay_again():
    policy = Adaptive(4, Price((1, 2), (1.0, 1.0), steps={"slow": 0.4}), retry=4, memory=8.0)

    def asked(rounds, stands):
        """The rounds in which the drafter was asked."""
        found = []
        for i in range(rounds):
            if policy.asks("slow"):
                found.append(i)
                policy.learn(chain(0.5, source="slow"), [0] if stands else [])
            else:
                policy.learn(Proposal(), [])
        return found

    last, but_one = asked(120, stands=False)[:-3:-1]
    assert last - but_one == 29  # 17, and longer for what was lost on balance
    assert asked(160, stands=True)[-20:] == list(range(140, 160))
    in_vain = asked(60, stands=False)
    pauses = [b - a for a, b in itertools.pairwise(in_vain) if b - a > 1]
    assert pauses[:3] == [5, 9, 17]


def drafted_by_the_sure(policy, rounds, stands):
    """Tokens that a drafter gets scored who is always sure and, round by round, right or not."""
    found = []
    for i in range(rounds):
        proposal = Proposal()
        if policy.hopes() and policy.length():
            proposal = policy.trim(chain(0.9, source="sure"))
        policy.learn(proposal, [0] if len(proposal) and stands(i) else [])
        found.append(len(proposal))
    return found


def test_what_is_lost_on_balance_is_bounded(monkeypatch):
    """However sure a drafter is of what never stands."""
    price = Price((1, 2), (1.0, 1.3))
    lost = 0.3 * sum(drafted_by_the_sure(Adaptive(4, price), 400, lambda i: False))
    assert lost < 5
    monkeypatch.setattr(adaptive, "_DISTRUST", 1e9)
    assert 0.3 * sum(drafted_by_the_sure(Adaptive(4, price), 400, lambda i: False)) > 1.2 * lost


def test_a_text_that_takes_to_drafts_late_is_found_out():
    policy = Adaptive(4, Price((1, 2), (1.0, 1.3)))
    drafted = drafted_by_the_sure(policy, 600, lambda i: i >= 300)
    assert sum(drafted[:300]) < 20
    assert sum(drafted[-100:]) == 100


def test_drafters_are_looked_at_less_while_nothing_is_drafted():
    policy = Adaptive(4, Price((1, 2), (1.0, 1.3)))
    looked = []
    for _ in range(24):
        looked.append(policy.hopes())
        policy.learn(Proposal(), [])
    assert looked == [True] * 8 + [False, False, False, True] * 4
    policy.hopes()
    policy.learn(chain(0.9), [0])
    assert policy.hopes()


def test_a_drafter_that_is_asked_again_is_scored_too():
    """Else its time is spent, and nothing is learned from it."""
    policy = Adaptive(4, Price((1, 2), (1.0, 1.3), steps={"slow": 0.2}), retry=4)
    tried = 0
    for _ in range(60):
        wanted, trying = policy.asks("slow"), policy._trying == "slow"
        proposal = policy.trim(chain(0.2, source="slow")) if wanted else Proposal()
        assert len(proposal) == 1 or not trying
        tried += trying
        policy.learn(proposal, [])
    assert tried >= 2


def test_drafts_better_than_they_think_are_found_out_too():
    policy = Adaptive(8, Price((1, 2), (1.0, 1.4)), retry=2)
    assert len(policy.trim(chain(0.45, 0.45))) == 0
    for _ in range(30):
        proposal = policy.trim(chain(0.45, 0.45))
        policy.learn(proposal, range(len(proposal)))
    assert len(policy.trim(chain(0.45, 0.45))) == 2


def test_the_path_of_a_tree_teaches_only_about_nodes_that_were_tried():
    policy = Adaptive(8, DEAR, prior=1.0)
    tree = Proposal((1, 2, 3), (-1, -1, 1), (None,) * 3, (0.6, 0.3, 0.3), "x")
    policy.learn(tree, [0])  # node 1 was tried and fell, so node 2 was not tried at all
    rates = {key: (r.kept, r.tried) for key, r in policy._rates.items()}
    assert rates == {("x", 4): (1.0, 1.0), ("x", 2): (0.0, 1.0)}


def test_a_drafter_that_does_not_pay_for_its_steps_is_asked_seldom():
    policy = Adaptive(4, Price((1, 2), (1.0, 1.0), steps={"slow": 0.4}), retry=4)
    assert policy.asks("slow")
    asked = 0
    for _ in range(50):
        wanted = policy.asks("slow")
        asked += wanted
        policy.learn(chain(0.5, source="slow") if wanted else Proposal(), [])
    assert 5 <= asked <= 20
    assert all(policy.asks("free") for _ in range(20))


def test_a_chain_goes_on_while_the_next_step_pays():
    policy = Adaptive(8, Price((1, 2), (1.0, 1.1), step=0.1))
    assert policy.goes_on("x", [0.9])
    assert not policy.goes_on("x", [0.9, 0.3])


@pytest.mark.parametrize(("alpha", "least", "most"), [(0.95, 6, 8), (0.6, 2, 4), (0.02, 0, 1)])
def test_sampled_chains_get_the_length_that_pays(alpha, least, most):
    policy, chance = Adaptive(8), random.Random(1)
    lengths = []
    for _ in range(300):
        n = policy.length()
        lengths.append(n)
        stood = next((i for i in range(n) if chance.random() > alpha), n)
        laws = [Distribution.one_hot(i, 9) for i in range(n)]
        policy.learn(Proposal.chain(range(n), laws), range(stood))
    usual = sorted(lengths[50:])[125]
    assert least <= usual <= most


@pytest.mark.parametrize("text", ["x", "-1", "1.5"])
def test_bad_arguments(text):
    with pytest.raises(UsageError, match="longest draft"):
        Adaptive.build(text)


def test_a_huge_longest_draft_takes_no_time_to_weigh():
    policy = Adaptive(10**9)
    policy.learn(Proposal.chain([1], [Distribution.one_hot(1, 9)]), [0])
    assert policy.length() <= 128


def test_less_than_nothing():
    with pytest.raises(SamplingError, match="0 or more"):
        Adaptive(-1)
    assert Adaptive(0).length() == 0


# --- in an engine --------------------------------------------------------------------------------


def engine(**how) -> Engine:
    draft = ModelDrafter(ToyModel.random(6, 2))
    return Engine(ToyModel.random(6, 1), ToyTokenizer(6), drafter=draft, **how)


def test_prices_by_the_clock_only_where_the_text_is_the_same_whatever_is_drafted(monkeypatch):
    asked = []

    def clock(model):
        asked.append(model)
        return DEAR

    monkeypatch.setattr("outrider.engine.engine.measure_rows", clock)
    e = engine()
    for name in ("rejection", "block"):
        policy = e.make_policy(rule=e.make_rule(_hot(), name))
        assert policy._price is NOMINAL
    assert not asked
    for name in ("coupled", "greedy"):
        rule = e.make_rule(_hot() if name == "coupled" else _cold(), name)
        assert e.make_policy(rule=rule)._price.of(2) == DEAR.of(2)
    assert len(asked) == 1  # once for an engine


def test_a_number_is_a_fixed_length_and_asks_no_clock(monkeypatch):
    monkeypatch.setattr("outrider.engine.engine.measure_rows", lambda model: pytest.fail("clock"))
    assert isinstance(engine(draft_length=3).make_policy(), Fixed)


def test_toys_have_nominal_prices():
    assert pricing.measure_rows(ToyModel.random(4, 1)) is NOMINAL


def test_steps_of_each_part_of_a_mixed_drafter():
    target = ToyModel.random(6, 1)
    part = ModelDrafter(ToyModel.random(6, 2))
    assert pricing.with_steps(NOMINAL, target, part, Greedy()) is NOMINAL
    steps = pricing.with_steps(DEAR, target, part, Greedy()).steps
    assert list(steps) == ["model"]
    assert steps["model"] > 0


@pytest.mark.parametrize(("rule", "draws"), [(Greedy(), False), (Coupled(), True)])
def test_a_step_is_priced_as_the_rule_drafts(monkeypatch, rule, draws):
    drawn = []
    monkeypatch.setattr(
        SeededChooser, "draw", lambda self, law, place: drawn.append(place) or law.argmax()
    )
    e = engine()
    pricing.with_steps(DEAR, e.model, e.drafter, rule)
    assert bool(drawn) is draws


def test_each_rule_has_steps_of_its_own(monkeypatch):
    steps = {"greedy": 1.0, "coupled": 2.0}
    monkeypatch.setattr("outrider.engine.engine.measure_rows", lambda model: DEAR)
    monkeypatch.setattr(
        "outrider.engine.engine.with_steps", lambda p, m, d, r: replace(p, step=steps[r.name])
    )
    e = engine()
    for rule in (Greedy(), Coupled(), Greedy()):
        assert e.price(rule=rule).step == steps[rule.name]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_same_at_any_price(monkeypatch, temperature):
    texts = set()
    for price in (NOMINAL, FREE, DEAR, Price((1, 2), (1.0, 9.0), steps={"model": 5.0})):
        monkeypatch.setattr("outrider.engine.engine.measure_rows", lambda model, p=price: p)
        out = engine().generate("abcab", max_tokens=40, temperature=temperature, seed=3)
        texts.add(tuple(out.token_ids))
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        ("eagle:toy:seed=3", "rejection"),
        ("eagle:toy:seed=3#chain", "rejection"),
        ("eagle:toy:seed=3#chain", "block"),
        ("model:toy:vocab=5", "rejection"),
        ("model:toy:vocab=5", "block"),
    ],
)
def test_a_seed_gives_the_same_text_on_every_machine(monkeypatch, drafter, rule):
    """Whatever its clock says: under these rules the text depends on what is drafted."""
    texts = set()
    for price in (FREE, DEAR, Price((1, 2), (1.0, 9.0))):
        for step in (0.0, 5.0):
            monkeypatch.setattr("outrider.engine.engine.measure_rows", lambda model, p=price: p)
            monkeypatch.setattr(
                "outrider.engine.engine.with_steps", lambda p, m, d, r, s=step: replace(p, step=s)
            )
            e = Engine.load("toy:vocab=5,seed=7", drafter=drafter, rule=rule)
            outs = [e.generate("abcab", max_tokens=24, temperature=1.0, seed=i) for i in range(5)]
            texts.add(tuple(tuple(out.token_ids) for out in outs))
            assert sum(out.trace.summary()["drafted_tokens"] for out in outs) > 0
    assert len(texts) == 1


def _hot():
    from outrider.core.processors import Sampling

    return Sampling(temperature=1.0)


def _cold():
    from outrider.core.processors import Sampling

    return Sampling()

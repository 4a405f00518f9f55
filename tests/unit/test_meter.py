"""Prices put right by the clock: fitted to simulated rounds, and what the policy makes of them."""

from __future__ import annotations

import random

import pytest

from outrider import Engine
from outrider.core.price import NOMINAL, Price
from outrider.core.proposal import Proposal
from outrider.policies.adaptive import Adaptive
from outrider.policies.meter import Meter

PRICE = Price((1, 2, 4, 8), (1.0, 1.1, 1.2, 1.8), steps={"slow": 0.2})


def rounds(meter: Meter, more: float, count: int = 200, one: float = 0.008, seed: int = 0) -> None:
    """Rounds of a machine where each row costs ``more`` than its price, within a tenth."""
    chance = random.Random(seed)
    for _ in range(count):
        n = chance.choice((1, 1, 2, 2, 3, 4, 8))
        ideal = one * (PRICE.of(n) + more * (n - 1))
        meter.took(n, ideal * chance.uniform(0.9, 1.1))


@pytest.mark.parametrize("more", [0.0, 0.03, 0.1, 0.4])
def test_rows_get_the_price_that_they_have(more):
    meter = Meter(PRICE)
    rounds(meter, more)
    for n in (1, 2, 4, 8):
        assert meter.of(n) == pytest.approx(PRICE.of(n) + more * (n - 1), rel=0.08)


def test_the_price_stands_where_rounds_are_all_alike():
    """Of two rows each time nobody can say what one would take."""
    meter = Meter(PRICE)
    for _ in range(100):
        meter.took(2, 0.02)
    assert meter.of(4) == pytest.approx(PRICE.of(4), abs=0.01)


def test_rounds_that_something_else_held_up_change_little():
    quiet, loud = Meter(PRICE), Meter(PRICE)
    rounds(quiet, 0.1)
    rounds(loud, 0.1, count=190)
    for _ in range(2):
        loud.took(2, 0.8)
        rounds(loud, 0.1, count=4)
    assert loud.of(4) == pytest.approx(quiet.of(4), rel=0.15)


def test_what_was_is_forgotten():
    meter = Meter(PRICE)
    rounds(meter, 0.0)
    rounds(meter, 0.2, count=400)
    assert meter.of(2) == pytest.approx(1.3, rel=0.08)


def test_a_price_never_leaves_reason():
    meter = Meter(PRICE)
    for _ in range(100):
        meter.took(1, 1e-6)
        meter.took(8, 10.0)
    assert PRICE.of(2) <= meter.of(2) <= PRICE.of(2) + 1.0
    for _ in range(400):
        meter.took(1, 1.0)
        meter.took(8, 1e-6)
    assert meter.of(8) >= 1.0


def test_many_rows_that_seem_to_cost_less_than_none_cost_what_one_does():
    """Where rows are free, and a clock says that long drafts take less time than short ones."""
    meter = Meter(Price((1, 64), (1.0, 1.0)))
    for _ in range(100):
        meter.took(1, 0.010)
        meter.took(64, 0.002)
        meter.took(2, 0.0)
    assert meter.of(64) == pytest.approx(1.0)
    assert meter.of(2) == pytest.approx(1.0)


def test_steps_get_the_price_that_they_have():
    meter = Meter(PRICE)
    meter.took(1, 0.010)
    assert meter.step_of("slow") == pytest.approx(0.2)
    for i in range(60):
        meter.stepped("slow", 1 + i % 3, 0.003 * (1 + i % 3))
        meter.took(2, 0.011)
    assert meter.step_of("slow") == pytest.approx(0.3, rel=0.05)


def test_a_drafter_without_a_price_takes_none():
    meter = Meter(PRICE)
    meter.took(1, 0.010)
    meter.stepped("free", 3, 0.5)
    assert meter.step_of("free") == 0.0


def played(
    policy: Adaptive, more: float, count: int, one: float = 0.008, stands: float = 0.4
) -> list[int]:
    """Rounds with a drafter whose single token stands so often; how many drafted."""
    chance, drafted = random.Random(3), []
    for _ in range(count):
        wanted = policy.asks("slow")
        proposal = Proposal()
        if wanted:
            proposal = policy.trim(Proposal.chain([1], confidence=[stands], source="slow"))
        n = 1 + len(proposal)
        draft_s = one * 0.2 * wanted
        policy.took(proposal, draft_s, draft_s + one * (PRICE.of(n) + more * (n - 1)))
        policy.learn(proposal, [0] if len(proposal) and chance.random() < stands else [])
        drafted.append(len(proposal))
    return drafted


def test_drafting_stops_where_rows_turn_out_dear():
    """As with a long context: by the price a draft pays, by the clock it does not."""
    cheap, dear = (sum(played(Adaptive(4, PRICE), more, 200)[100:]) for more in (0.0, 0.3))
    assert cheap > 60
    assert dear < 20


def test_a_round_without_a_draft_shows_now_and_then_what_drafts_cost():
    without = [i for i, n in enumerate(played(Adaptive(4, PRICE), 0.0, 200, stands=0.5)) if not n]
    assert 2 <= len(without) <= 30


def test_no_clock_for_a_text_that_depends_on_what_is_drafted():
    slow, fast = (played(Adaptive(4, NOMINAL), more, 200) for more in (0.0, 0.3))
    assert slow == fast


@pytest.mark.parametrize(("rule", "told"), [("coupled", True), ("rejection", False)])
def test_the_policy_is_told_only_where_the_rule_is_invariant(rule, told, monkeypatch):
    heard = []

    def listen(policy, proposal, draft_s, total_s):
        assert 0.0 <= draft_s <= total_s
        heard.append(len(proposal))

    monkeypatch.setattr(Adaptive, "took", listen)
    engine = Engine.load("toy:vocab=4", drafter="ngram", rule=rule)
    output = engine.generate("abababab", max_tokens=12, temperature=1.0, seed=1)
    assert heard == ([one.drafted for one in output.trace.rounds] if told else [])


def test_what_pays_clearly_is_never_left_out():
    policy, left_out = Adaptive(4, PRICE), []
    for i in range(200):
        wanted = policy.asks("slow")
        if not wanted:
            left_out.append(i)
        chain = Proposal.chain([1], confidence=[0.9], source="slow") if wanted else Proposal()
        policy.took(chain, 0.0016 * wanted, 0.008 * (1.3 if wanted else 1.0))
        policy.learn(chain, range(len(chain)))
    assert len(left_out) <= 2
    assert all(i < 10 for i in left_out)


def test_beside_others_attempts_in_vain_are_rarer():
    """There a step holds up everyone."""

    def asked(rows: int) -> int:
        policy = Adaptive(4, PRICE)
        found = 0
        for _ in range(300):
            policy.beside(rows, float(rows))
            wanted = policy.asks("slow")
            found += wanted
            proposal = Proposal.chain([1], confidence=[0.4], source="slow")
            policy.learn(proposal if wanted else Proposal(), [])
        return found

    assert asked(15) <= asked(0) / 2

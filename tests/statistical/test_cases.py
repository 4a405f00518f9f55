"""Cases 3 and 15: q as it was really drawn from, and residuals where p/q is tiny.

Each statistical test fails a correct program with probability at most ``ALPHA`` over its seeds.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.core.chooser import Place, SeededChooser, enumerate_outcomes
from outrider.core.distribution import Distribution
from outrider.core.processors import Context, Sampling
from outrider.core.proposal import Proposal
from outrider.registry import RULES
from tests.chance import ALPHA, chi_square

SAMPLED = ["rejection", "block"]


def one_round(rule, p, q, chooser, round_=0, *, claimed=None):
    """The first token that one drafted token and its judgement emit."""
    token, law = rule.draft(q, chooser, 0, round_, 0)
    proposal = Proposal.chain([token], [claimed or law])
    verdict = rule.judge(lambda node: p, proposal, chooser, 0, round_)
    return token if verdict.path else verdict.token


def draws(rule, p, q, count, **claim):
    chooser, counts = SeededChooser(5), np.zeros(p.vocab_size)
    for round_ in range(count):
        counts[one_round(rule, p, q, chooser, round_, **claim)] += 1
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.8}, {"top_k": 4, "top_p": 0.9}])
def test_case_3_the_law_under_filters_at_200_thousand_draws(name, filters):
    rng = np.random.default_rng(3)
    law = Sampling(temperature=1.0, **filters).law(frozenset(), 8)
    target = torch.from_numpy(rng.normal(0, 1, 8))
    draft = target + torch.from_numpy(rng.normal(0, 0.7, 8))
    p, q = law(Context([0], 1), target), law(Context([0], 1), draft)
    rule = RULES.load(name)()
    counts = draws(rule, p, q, 200_000)
    assert chi_square(counts, p.to_dense()) > ALPHA
    # The same with the law before the filters reported for what was drawn after them.
    raw = Distribution.softmax(draft)
    assert chi_square(draws(rule, p, q, 20_000, claimed=raw), p.to_dense()) < ALPHA


def tiny_ratios(dtype):
    """Logits whose ratios p/q go from 1e-9 to almost 1, as a model in half precision gives them."""
    p = torch.tensor([0.0, -20.0, -12.0, -6.0, -1.0, -0.01, -3.0, -9.0], dtype=dtype)
    q = torch.tensor([-1.0, 0.0, 0.0, -1.0, -0.5, 0.0, -3.01, -8.99], dtype=dtype)
    return Distribution.softmax(p), Distribution.softmax(q)


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SAMPLED)
def test_case_15_tiny_ratios_exactly(name, dtype):
    p, q = tiny_ratios(dtype)
    assert min(p.probs / q.at(p.ids)) < 1e-8
    made = np.zeros(8)
    rule = RULES.load(name)()
    for token, weight in enumerate_outcomes(lambda chooser: one_round(rule, p, q, chooser)):
        made[token] += weight
    assert np.abs(made - p.to_dense()).max() < 1e-15
    # Relative, too: an epsilon in a ratio would show at the rarest token first.
    assert np.allclose(made, p.to_dense(), rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_case_15_a_million_draws(dtype):
    p, q = tiny_ratios(dtype)
    counts = draws(RULES.load("rejection")(), p, q, 1_000_000)
    assert chi_square(counts, p.to_dense()) > ALPHA


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_case_15_equal_laws_never_leave_an_empty_residual(dtype):
    rng, chooser = np.random.default_rng(0), SeededChooser(1)
    for i in range(2000):
        p = Distribution.softmax(torch.from_numpy(rng.normal(0, 4, 50)).to(dtype))
        left = p.residual(p)
        assert left.probs.sum() == pytest.approx(1.0, abs=1e-12)
        token, law = RULES.load("rejection")().draft(p, chooser, 0, i, 0)
        verdict = RULES.load("rejection")().judge(
            lambda node, p=p: p, Proposal.chain([token], [law]), chooser, 0, i
        )
        assert verdict.path == (0,)  # where p = q nothing is ever rejected
        assert 0 <= chooser.draw(left, Place(0, "residual", i, 1)) < 50

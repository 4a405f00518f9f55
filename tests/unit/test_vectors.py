"""Loops over a vocabulary: numpy's numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.vectors import as_floats, best, exponentials, log_sum_exp, softmax

SIZES = st.sampled_from([1, 2, 7, 255, 256, 257, 1000])
TYPES = st.sampled_from([np.float32, np.float64])


def some(size: int, dtype: type, wide: float, seed: int) -> np.ndarray:
    chance = np.random.default_rng(seed)
    values = wide * chance.standard_normal(size)
    values[chance.random(size) < 0.1] = -np.inf
    values[0] = 0.3
    return values.astype(dtype)


@given(size=SIZES, dtype=TYPES, wide=st.floats(0.01, 400.0), seed=st.integers(0, 2**32))
def test_exponentials(size, dtype, wide, seed):
    values = some(size, dtype, wide, seed)
    top = float(values.max())
    found, wanted = np.full(size, np.nan), np.exp(values.astype(float) - top)
    exponentials(values, top, found)
    np.testing.assert_allclose(found, wanted, rtol=4e-16, atol=1e-300)
    assert softmax(values, top, found) == np.count_nonzero(found)
    np.testing.assert_allclose(found, wanted / wanted.sum(), rtol=2e-15, atol=1e-300)
    assert log_sum_exp(values, top) == pytest.approx(top + np.log(wanted.sum()), rel=1e-14)


@pytest.mark.parametrize("x", [-0.0, -1e-320, -1e-9, -0.34657, -0.34658, -36.7, -707.999, -708.0])
def test_exponentials_at_the_edges(x):
    found = np.empty(1)
    exponentials(np.array([x]), 0.0, found)
    assert found[0] == pytest.approx(np.exp(x), rel=4e-16)


@pytest.mark.parametrize("x", [-708.1, -745.0, -1e30, -np.finfo(float).max, -np.inf])
def test_what_cannot_come_has_no_weight(x):
    found = np.full(2, np.nan)
    exponentials(np.array([x, 0.0]), 0.0, found)
    assert found.tolist() == [0.0, 1.0]


@given(
    size=SIZES, dtype=TYPES, count=st.integers(1, 300), few=st.booleans(), seed=st.integers(0, 99)
)
def test_the_best_in_the_order_of_their_places(size, dtype, count, few, seed):
    values = some(size, dtype, 1.0, seed)
    if few:
        values = np.round(values)  # many are equal
    assert best(values, count).tolist() == np.argsort(-values, kind="stable")[:count].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_numbers_of_any_kind(dtype):
    values = torch.tensor([1.5, -2.25, -torch.inf], dtype=dtype)
    assert as_floats(values).tolist() == [1.5, -2.25, -np.inf]

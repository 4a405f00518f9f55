"""Metrics on a trace whose numbers were worked out by hand, and the table that names them."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from outrider import registry
from outrider.core.trace import Round
from outrider.lab.metrics import Metric, all_metrics
from outrider.lab.record import Record
from outrider.registry import METRICS, Table

# 3 + 1 + 4 = 8 tokens in 3 calls; 7 drafted, 5 kept; 4 ms drafting, 60 ms scoring, 68 ms in all.
ROUNDS = [
    Round(4, 2, 1, 0, True, 0.001, 0.020, 0.022),
    Round(0, 0, 0, 1, False, 0.000, 0.010, 0.011),
    Round(3, 3, 0, 1, False, 0.003, 0.030, 0.035),
]
BY_HAND = {
    "acceptance_rate": 5 / 7,
    "tokens_per_target_call": 8 / 3,
    "target_calls_per_token": 3 / 8,
    "drafted_per_call": 7 / 3,
    "draft_ms_per_round": 4 / 3,
    "draft_ms_per_token": 4 / 7,
    "verify_ms_per_call": 20.0,
    "tokens_per_s": 8 / 0.168,
    "decode_tokens_per_s": 8 / 0.068,
    "ttft_ms": 122.0,
    "tpot_ms": (168 - 122) / 7,
    "total_ms": 168.0,
    "draft_share": 4 / 68,
    "verify_share": 60 / 68,
    "other_share": 4 / 68,
}


def record(rounds, *, prefill_s=0.1, ttft_s=0.122, total_s=0.168) -> Record:
    return Record(
        "x", 0, "chat", 0, 1, 0.0, 0, 9, [], "", "length", prefill_s, ttft_s, total_s, rounds
    )


@pytest.mark.parametrize("name", METRICS)
def test_by_hand(name):
    assert all_metrics()[name].of(record(ROUNDS)) == pytest.approx(BY_HAND[name], rel=1e-12)


def test_every_metric_was_worked_out():
    assert set(BY_HAND) == set(METRICS)


@pytest.mark.parametrize("name", METRICS)
def test_nothing_done_has_no_value(name):
    assert all_metrics()[name].of(record([], prefill_s=0.0, ttft_s=0.0, total_s=0.0)) is None


def test_plain_decoding():
    plain = record([Round(0, 0, 0, 1, False, 0.0, 0.01, 0.01)] * 4, total_s=0.14, ttft_s=0.11)
    found = {name: metric.of(plain) for name, metric in all_metrics().items()}
    assert found["acceptance_rate"] is None
    assert found["draft_ms_per_token"] is None
    assert (found["tokens_per_target_call"], found["target_calls_per_token"]) == (1.0, 1.0)
    assert (found["drafted_per_call"], found["draft_share"]) == (0.0, 0.0)
    assert found["tpot_ms"] == pytest.approx(10.0)
    assert found["decode_tokens_per_s"] == pytest.approx(100.0)


def test_the_shares_are_the_whole():
    found = {name: metric.of(record(ROUNDS)) for name, metric in all_metrics().items()}
    assert sum(found[f"{part}_share"] for part in ("draft", "verify", "other")) == pytest.approx(1)


def test_one_token_has_no_pace():
    one = record([Round(0, 0, 0, 1, False, 0.0, 0.01, 0.01)], total_s=0.11, ttft_s=0.11)
    assert all_metrics()["tpot_ms"].of(one) is None
    assert all_metrics()["ttft_ms"].of(one) == pytest.approx(110.0)


@pytest.mark.parametrize("name", METRICS)
def test_each_offers_what_the_protocol_asks_for(name):
    metric = METRICS.load(name)()
    assert isinstance(metric, Metric)
    assert metric.name == name
    assert metric.better in ("up", "down", None)
    assert metric.formula
    assert metric.unit == "ms" or not name.endswith("_ms")


def test_other_packages_add_theirs(monkeypatch):
    def entry_points(*, group):
        assert group == "outrider.metrics"
        return [EntryPoint("theirs", "collections:OrderedDict", group)]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    table = Table("metrics", "metric", dict(METRICS))
    assert table.load("theirs").__name__ == "OrderedDict"

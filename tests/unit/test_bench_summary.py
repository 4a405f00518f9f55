"""What records come to: made by hand with known answers, and simulated with a known truth."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from outrider.core.trace import Round
from outrider.lab.record import Record, Run
from outrider.lab.strata import position_of, strata
from outrider.lab.summary import Summary, same_tokens_promised, summarize
from outrider.lab.table import columns, table_rows
from outrider.lab.wording import conclusions, notes


def plain_round(seconds: float = 0.01) -> Round:
    return Round(0, 0, 0, 1, False, 0.0, seconds, seconds)


def draft_round(drafted: int, accepted: int, seconds: float) -> Round:
    rejected = accepted < drafted
    return Round(
        drafted, accepted, int(rejected), int(not rejected), rejected, 0.0, seconds, seconds
    )


def record(
    configuration: str,
    prompt: int,
    rounds: Sequence[Round],
    *,
    kind: str = "chat",
    repeat: int = 0,
    temperature: float = 0.0,
    prefill_s: float = 0.0,
    tokens: Sequence[int] | None = None,
    entropies: Sequence[float] = (),
    **more,
) -> Record:
    emitted = sum(r.emitted for r in rounds)
    ids = list(range(emitted)) if tokens is None else list(tokens)
    total = prefill_s + sum(r.total_s for r in rounds)
    ttft = prefill_s + (rounds[0].total_s if rounds else 0.0)
    defaults = {"rule": "greedy", "drafter": configuration}
    return Record(
        configuration, prompt, kind, repeat, 1, temperature, prompt, 5, ids, "p" * emitted,
        "length", prefill_s, ttft, total, list(rounds), list(entropies), **(defaults | more),
    )  # fmt: skip


def pair(prompt: int, speed: float, **options) -> list[Record]:
    """Ten plain tokens at 10 ms, and ten in five rounds that are ``speed`` times as fast."""
    ours = [draft_round(1, 1, 0.1 / 5 / speed)] * 5
    return [
        record("plain", prompt, [plain_round()] * 10, **options),
        record("ngram", prompt, ours, **options),
    ]


def summary_of(records: list[Record], **conditions) -> Summary:
    return summarize(Run(conditions, records))


def of(summary: Summary, configuration: str, temperature: float = 0.0):
    return next(
        row
        for row in summary.rows
        if (row.configuration, row.temperature) == (configuration, temperature)
    )


class TestSpeedup:
    def test_by_hand(self):
        speeds = [1.5, 2.0, 0.98, 0.9, 1.2]
        found = of(summary_of([r for i, s in enumerate(speeds) for r in pair(i, s)]), "ngram")
        speed = found.speedup
        assert speed.n == 5
        assert speed.median == pytest.approx(1.2)
        assert speed.mean == pytest.approx(np.mean(speeds))
        assert speed.geometric_mean == pytest.approx(np.prod(speeds) ** (1 / 5))
        assert (speed.p10, speed.p90) == pytest.approx(tuple(np.quantile(speeds, [0.1, 0.9])))
        assert (speed.slower, speed.clearly_slower) == (0.4, 0.2)
        assert (speed.worst, speed.worst_prompt) == (pytest.approx(0.9), 3)
        assert speed.low <= speed.median <= speed.high
        assert speed.verdict == "too few prompts"

    def test_repeats_are_one_value_a_prompt(self):
        records = []
        for repeat, disturbed in enumerate((1.0, 1.0, 30.0)):
            for one in pair(0, 2.0, repeat=repeat):
                if one.configuration == "ngram":
                    slow = [Round(1, 1, 0, 1, False, 0, 0, 0.01 * disturbed)] * 5
                    one = record("ngram", 0, slow, repeat=repeat)
                records.append(one)
        found = of(summary_of(records), "ngram")
        assert (found.prompts, found.records, found.speedup.n) == (1, 3, 1)
        assert found.speedup.median == pytest.approx(2.0)
        assert found.metrics["tokens_per_s"].n == 1
        assert found.speedup.low is None

    def test_the_prompts_pass_counts(self):
        found = of(summary_of(pair(0, 2.0, prefill_s=0.1)), "ngram").speedup
        assert found.median == pytest.approx(0.2 / 0.15)

    def test_outputs_of_other_lengths_are_compared_by_rate(self):
        longer = record("ngram", 0, [draft_round(1, 1, 0.01)] * 10)  # 20 tokens in 0.1 s
        plain = record("plain", 0, [plain_round()] * 10)
        assert of(summary_of([longer, plain]), "ngram").speedup.median == pytest.approx(2.0)

    def test_only_prompts_that_both_finished(self):
        records = [*pair(0, 2.0), *pair(1, 3.0)][:3]  # the second prompt has plain alone
        found = summary_of(records)
        assert of(found, "ngram").speedup.n == 1
        assert of(found, "plain").prompts == 2
        alone = summary_of([record("ngram", 0, [draft_round(1, 1, 0.01)])])
        assert of(alone, "ngram").speedup is None
        assert "nothing to compare" in conclusions(alone)[0]

    def test_temperatures_and_adapters_are_groups_of_their_own(self):
        records = [
            *pair(0, 2.0), *pair(0, 4.0, temperature=0.7, rule="coupled"),
            *pair(0, 8.0, adapter="mine"),
        ]  # fmt: skip
        found = summary_of(records)
        told = {
            (row.adapter, row.temperature): row.speedup.median for row in found.rows if row.speedup
        }
        assert told == pytest.approx({("", 0.0): 2.0, ("", 0.7): 4.0, ("mine", 0.0): 8.0})

    def test_rows_stand_in_the_order_of_the_command(self):
        records = [record(c, 0, [plain_round()]) for c in ("b", "plain", "c", "a")]
        named = [{"label": label} for label in ("c", "b")]
        found = summary_of(records, configurations=named)
        assert [row.configuration for row in found.rows] == ["plain", "c", "b", "a"]

    @pytest.mark.parametrize(("truth", "verdict"), [(1.3, "pays"), (0.8, "costs")])
    def test_simulated_runs_are_told_as_they_are(self, truth, verdict):
        rng = np.random.default_rng(5)
        for _ in range(10):
            speeds = truth * np.exp(rng.normal(0, 0.1, 40))
            found = of(summary_of([r for i, s in enumerate(speeds) for r in pair(i, s)]), "ngram")
            assert found.speedup.verdict == verdict

    def test_plain_against_itself_pays_rarely(self):
        rng = np.random.default_rng(6)
        said = [
            of(
                summary_of(
                    [r for i, s in enumerate(np.exp(rng.normal(0, 0.1, 20))) for r in pair(i, s)]
                ),
                "ngram",
            ).speedup.verdict
            for _ in range(40)
        ]
        # 5 % of runs expected; more than 7 of 40 in one case of 1000.
        assert said.count("unclear") >= 33


class TestSame:
    def test_counted_where_promised_and_named_where_not(self):
        records = [
            record("plain", 0, [plain_round()] * 3, tokens=[1, 2, 3]),
            record("ngram", 0, [plain_round()] * 3, tokens=[1, 2, 3]),
            record("plain", 1, [plain_round()] * 3, tokens=[1, 2, 3]),
            record("ngram", 1, [plain_round()] * 3, tokens=[1, 5, 3]),
            record("plain", 2, [plain_round()] * 3, tokens=[1, 2, 3]),
            record("ngram", 2, [plain_round()] * 2, tokens=[1, 2]),
        ]
        found = summary_of(records, prompt_ids=["a", "b", "c"])
        same = of(found, "ngram").same
        assert (same.compared, same.same, same.promised) == (3, 1, True)
        assert [(p.prompt, p.position) for p in same.parted] == [(1, 1), (2, 2)]
        assert of(found, "plain").same is None
        (note,) = notes(found)
        assert "ngram at temperature 0, 2 of 3 outputs (first prompt b, from token 1)" in note

    def test_what_keeps_the_law_alone_is_no_fault(self):
        records = [
            record("plain", 0, [plain_round()], tokens=[1], temperature=1.0, rule="coupled"),
            record("rej", 0, [plain_round()], tokens=[2], temperature=1.0, rule="rejection"),
        ]
        found = summary_of(records)
        same = of(found, "rej", 1.0).same
        assert (same.same, same.promised) == (0, False)
        assert list(notes(found)) == []

    @pytest.mark.parametrize(
        ("rule", "temperature", "promised"),
        [("rejection", 0.0, True), ("rejection", 0.5, False), ("coupled", 0.5, True)],
    )
    def test_promises(self, rule, temperature, promised):
        assert same_tokens_promised(rule, temperature) is promised


class TestStrata:
    def test_positions_double(self):
        assert [position_of(i) for i in (0, 15, 16, 31, 32, 63, 64, 200)] == [
            "0-15", "0-15", "16-31", "16-31", "32-63", "32-63", "64-127", "128-255",
        ]  # fmt: skip

    def test_by_kind(self):
        records = [*pair(0, 2.0, kind="code"), *pair(1, 4.0, kind="code"), *pair(2, 0.5)]
        found = {(one.value, one.configuration): one for one in strata(records) if one.by == "kind"}
        assert list(found) == [
            ("code", "plain"), ("code", "ngram"), ("chat", "plain"), ("chat", "ngram"),
        ]  # fmt: skip
        code, chat = found["code", "ngram"], found["chat", "ngram"]
        assert (code.speedup, code.slower) == (pytest.approx(3.0), 0.0)
        assert (chat.speedup, chat.slower, chat.low) == (pytest.approx(0.5), 1.0, None)
        assert (code.prompts, code.tokens, code.tokens_per_target_call) == (2, 20, 2.0)
        assert code.acceptance_rate == 1.0
        assert found["code", "plain"].acceptance_rate is None
        assert found["code", "plain"].speedup is None

    def test_by_position_a_round_belongs_where_it_begins(self):
        # Rounds of 4 tokens: at 0, 4, 8, 12 they begin in the first bucket, then at 16 and 20.
        ours = [draft_round(3, 3, 0.01)] * 4 + [draft_round(3, 3, 0.08)] * 2
        plain = [plain_round()] * 24
        records = [record("plain", 0, plain), record("x", 0, ours)]
        found = {
            (one.value, one.configuration): one for one in strata(records) if one.by == "position"
        }
        assert found["0-15", "x"].speedup == pytest.approx(4.0)
        assert found["16-31", "x"].speedup == pytest.approx(0.5)
        assert (found["0-15", "x"].tokens, found["16-31", "x"].tokens) == (16, 8)
        assert found["0-15", "plain"].tokens == 16

    def test_by_entropy(self):
        # Twelve tokens, the first half sure; sure places come in blocks of three.
        entropies = [0.0] * 4 + [0.1] * 2 + [2.0] * 3 + [3.0] * 3
        plain = record("plain", 0, [plain_round()] * 12, entropies=entropies)
        ours = record(
            "x",
            0,
            [draft_round(2, 2, 0.01)] * 2 + [draft_round(2, 0, 0.02)] * 6,
            entropies=entropies,
        )
        found = [one for one in strata([plain, ours]) if one.by == "entropy"]
        by = {(one.value, one.configuration): one for one in found}
        values = list(dict.fromkeys(one.value for one in found))
        # Quartiles of plain's: 0, 1.05 and 2.25; nothing lies below the first.
        assert values == ["0.00 to 1.05", "1.05 to 2.25", "2.25 and more"]
        assert by[values[0], "x"].acceptance_rate == 1.0
        assert by[values[0], "x"].speedup == pytest.approx(3.0)
        assert by[values[1], "x"].acceptance_rate == 0.0
        assert by[values[2], "x"].speedup == pytest.approx(0.5)
        assert sum(by[v, "plain"].tokens for v in values) == 12

    def test_by_temperature(self):
        records = [*pair(0, 2.0), *pair(0, 1.0, temperature=0.7)]
        found = [one for one in strata(records) if one.by == "temperature"]
        assert [(one.value, one.configuration) for one in found] == [
            ("0", "plain"), ("0", "ngram"), ("0.7", "plain"), ("0.7", "ngram"),
        ]  # fmt: skip
        assert all(one.temperature is None for one in found)
        assert found[1].speedup == pytest.approx(2.0)

    def test_parts_of_the_prompts_are_told_by_the_speed_up_of_the_whole(self):
        options = {"prefill_s": 0.1}
        records = [r for i, s in enumerate((2.0, 3.0)) for r in pair(i, s, kind="code", **options)]
        # An even number of repeats, of which the median of times is not that of rates.
        records += [r for n in (0, 1) for r in pair(2, 1.0 + 3 * n, repeat=n, **options)]
        whole = of(summary_of(records), "ngram").speedup
        by = {one.value: one for one in strata(records) if one.by == "kind" and one.speedup}
        chat = of(summary_of(records[4:]), "ngram").speedup
        assert by["chat"].speedup == pytest.approx(chat.median)
        other = pair(3, 2.0, temperature=0.7, **options)
        by_temperature = {one.value: one for one in strata([*records, *other])
                          if one.by == "temperature" and one.speedup}  # fmt: skip
        told = by_temperature["0"]
        assert (told.speedup, told.low, told.high) == pytest.approx(
            (whole.median, whole.low, whole.high)
        )

    def test_rounds_of_a_place_leave_the_prompts_pass_out(self):
        records = [record("plain", 0, [plain_round()] * 24, prefill_s=9.0),
                   record("x", 0, [draft_round(3, 3, 0.02)] * 6, prefill_s=9.0)]  # fmt: skip
        found = [one.speedup for one in strata(records) if one.by == "position" and one.speedup]
        assert found == pytest.approx([2.0, 2.0])

    def test_one_part_is_no_division(self):
        assert strata(pair(0, 2.0)) == []

    def test_repeats_and_prompts_are_paired(self):
        records = [r for n in range(3) for r in pair(7, 2.0 + n, repeat=n, kind="code")]
        records += pair(8, 5.0)
        (code,) = [
            one for one in strata(records) if one.value == "code" and one.configuration == "ngram"
        ]
        assert (code.speedup, code.prompts) == (pytest.approx(3.0), 1)


class TestWords:
    def told(self, *speeds: float, **conditions) -> str:
        records = [r for i, s in enumerate(speeds) for r in pair(i, s)]
        return conclusions(summary_of(records, **conditions))[0]

    def test_what_pays(self):
        told = self.told(*[1.5] * 5, 0.9, 0.99, *[1.5] * 13)
        assert told == (
            "At temperature 0, ngram pays: 1.50 times plain (1.50 to 1.50), slower on 10% of "
            "prompts, by more than 3 % on 5%."
        )

    def test_what_does_not(self):
        assert self.told(*[0.8] * 9).endswith(
            "ngram (0.80) is slower than plain decoding: use --drafter none here."
        )

    def test_what_cannot_be_told(self):
        assert "no clear difference" in self.told(*[0.9, 1.1] * 5)
        assert "too few prompts to say what pays (ngram 2.00 times plain)" in self.told(*[2.0] * 5)
        assert "pays" in self.told(*[2.0] * 6)

    def test_kinds_on_which_it_does_not(self):
        records = [r for i in range(9) for r in pair(i, 2.0, kind="code")]
        records += [r for i in range(9, 12) for r in pair(i, 0.8, kind="stories")]
        assert "(not on stories)" in conclusions(summary_of(records))[0]

    def test_an_unfinished_run_says_so(self):
        found = summary_of(pair(0, 2.0), planned=6)
        assert list(notes(found)) == ["Not finished: 2 of 6 generations."]
        assert conclusions(summary_of([])) == ["Nothing was measured."]

    def test_an_unsteady_machine_is_told(self):
        records = [
            record("plain", 0, [plain_round(seconds)] * 4, repeat=i)
            for i, seconds in enumerate((0.010, 0.012, 0.011))
        ]
        found = summary_of(records)
        assert found.unsteadiness == pytest.approx(0.002 / 0.011)
        assert "varies by 18%" in next(notes(found))


class TestShapes:
    def test_json(self):
        about = {
            "targets": {"bare": {"weights_bytes": 5, "draft_bytes": {"plain": None, "ngram": 3}}}
        }
        records = [*pair(0, 2.0, cache_bytes=10, peak_bytes=100), *pair(1, 2.0, kind="code")]
        found = json.loads(json.dumps(summary_of(records, **about).to_dict()))
        assert set(found) == {
            "conditions", "metrics", "rows", "strata", "unsteadiness", "finished", "planned",
        }  # fmt: skip
        plain, ours = found["rows"]
        assert (plain["configuration"], plain["speedup"], plain["same"]) == ("plain", None, None)
        assert ours["memory"] == {
            "weights_bytes": 5, "draft_bytes": 3, "cache_bytes": 10, "peak_bytes": 100,
        }  # fmt: skip
        assert set(ours["metrics"]) == set(found["metrics"])
        assert set(ours["metrics"]["tokens_per_s"]) == {"n", "median", "mean", "p10", "p90"}
        assert found["metrics"]["acceptance_rate"]["better"] == "up"
        assert found["finished"] == 4

    def test_rows_of_a_table(self):
        rows = list(table_rows(Run({"target": "toy", "prompt_ids": ["a"]}, pair(0, 2.0))))
        assert all(list(row) == columns() for row in rows)
        assert [row["configuration"] for row in rows] == ["plain", "ngram"]
        assert rows[1]["prompt_id"] == "a"
        assert rows[1]["same_tokens_as_plain"] is True
        assert rows[1]["accepted_tokens"] == 5
        assert rows[1]["tokens_per_s"] == pytest.approx(200.0)
        assert rows[0]["acceptance_rate"] is None

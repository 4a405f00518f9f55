"""The log: a record comes back as it was, a cut file goes on, another run's file is refused."""

from __future__ import annotations

import json

import pytest

from outrider.core.trace import Round
from outrider.engine.generation import Output, Trace
from outrider.errors import LogError
from outrider.lab.record import Log, Record

ROUNDS = [Round(4, 2, 1, 0, True, 0.001, 0.02, 0.022), Round(0, 0, 0, 1, False, 0.0, 0.01, 0.011)]


def record(**changed) -> Record:
    values = {
        "configuration": "ngram", "prompt": 3, "kind": "chat", "repeat": 1, "batch": 1,
        "temperature": 0.7, "seed": 5, "prompt_tokens": 9, "token_ids": [1, 2, 3, 4],
        "origins": "aacp", "finish_reason": "length", "prefill_s": 0.1, "ttft_s": 0.122,
        "total_s": 0.133, "rounds": ROUNDS, "entropies": [0.5, 0.0, 1.25, 2.0],
        "pieces": ["a", "", "b", "c"], "adapter": "mine", "drafter": "ngram", "rule": "coupled",
        "order": 2, "cache_bytes": 100, "peak_bytes": None,
    }  # fmt: skip
    return Record(**(values | changed))


@pytest.fixture
def log(tmp_path) -> Log:
    made = Log(tmp_path / "deep" / "bench.jsonl")
    made.begin({"target": "toy", "seed": 1, "repeats": 1})
    return made


class TestRecord:
    def test_comes_back_as_it_was(self):
        one = record()
        assert Record.from_dict(json.loads(json.dumps(one.to_dict()))) == one

    def test_summary_is_beside_the_fields(self):
        told = record().to_dict()
        assert told["summary"]["acceptance_rate"] == 0.5
        assert told["summary"]["emitted_tokens"] == 4
        assert told["rounds"][0] == [4, 2, 1, 0, True, 0.001, 0.02, 0.022]

    def test_key_tells_apart_all_that_differs(self):
        changes = [
            {}, {"configuration": "plain"}, {"prompt": 4}, {"repeat": 0}, {"batch": 2},
            {"temperature": 0.0}, {"adapter": ""},
        ]  # fmt: skip
        assert len({record(**change).key for change in changes}) == len(changes)
        assert record(seed=6).key == record().key

    def test_of_an_output(self):
        trace = Trace(prompt_tokens=9, prefill_s=0.1, ttft_s=0.122, total_s=0.133, rounds=ROUNDS)
        origins = ["accepted", "accepted", "correction", "plain"]
        output = Output("abcd", [1, 2, 3, 4], "length", trace, 5, "ngram", "coupled", origins)
        about = {
            "configuration": "ngram", "prompt": 3, "kind": "chat", "repeat": 1, "batch": 1,
            "temperature": 0.7,
        }  # fmt: skip
        made = Record.of(output, **about)
        assert (made.origins, made.seed, made.drafter, made.rule) == ("aacp", 5, "ngram", "coupled")
        assert made.trace.summary() == trace.summary()

    @pytest.mark.parametrize("change", [{"nonsense": 1}, {"rounds": [[1, 2]]}, {"rounds": 3}])
    def test_a_line_that_is_none(self, change):
        with pytest.raises(LogError, match="no measurement"):
            Record.from_dict(record().to_dict() | change)

    def test_logs_of_before_the_later_fields_are_read(self):
        told = record().to_dict()
        for name in ("adapter", "drafter", "rule", "order", "cache_bytes", "peak_bytes"):
            del told[name]
        old = Record.from_dict(told)
        assert (old.adapter, old.order, old.cache_bytes) == ("", 0, None)


class TestLog:
    def test_records_in_their_order(self, log):
        some = [record(prompt=i) for i in range(3)]
        for one in some:
            log.add(one)
        assert list(log.records()) == some
        assert log.run().records == some
        assert log.run().conditions["target"] == "toy"

    def test_goes_on_after_a_cut_line(self, log):
        log.add(record(prompt=0))
        whole = log.path.read_text()
        log.path.write_text(whole + json.dumps(record(prompt=1).to_dict())[:50])
        again = Log(log.path)
        assert [r.prompt for r in again.records()] == [0]
        again.begin({"target": "toy"}, fixed=["target"])
        assert log.path.read_text() == whole
        again.add(record(prompt=1))
        assert [r.prompt for r in again.records()] == [0, 1]

    def test_a_log_cut_within_its_first_line_begins_anew(self, log):
        log.path.write_text(log.path.read_text()[:30])
        assert not log.started
        log.begin({"target": "other"}, fixed=["target"])
        assert log.conditions() == {"target": "other"}

    @pytest.mark.parametrize("text", ["my notes, without a line's end", "a line\n", '{"a": 1}\n'])
    def test_a_file_of_something_else_is_left_alone(self, tmp_path, text):
        path = tmp_path / "notes.txt"
        path.write_text(text)
        with pytest.raises(LogError, match=r"notes\.txt"):
            Log(path).begin({"target": "toy"})
        assert path.read_text() == text

    def test_another_run_is_refused_with_both_values(self, log):
        with pytest.raises(LogError, match=r"differs: arguments \(seed was 1, here 2\)\."):
            log.begin({"target": "toy", "seed": 2}, fixed=["target", "seed"])

    def test_what_is_not_fixed_may_change(self, log):
        log.begin({"target": "toy", "seed": 2}, fixed=["target"])
        log.update({"repeats": 3, "target": "toy"})
        assert log.conditions()["repeats"] == 3
        lines = log.path.read_text().splitlines()
        log.update({"repeats": 3})
        assert log.path.read_text().splitlines() == lines
        assert json.loads(lines[-1]) == {"conditions": {"repeats": 3}}

    def test_values_that_json_changes_are_still_the_same(self, tmp_path):
        log = Log(tmp_path / "x.jsonl")
        conditions = {"bias": {7: -1.0}, "lengths": (1, 2), "file": tmp_path}
        log.begin(conditions)
        log.begin(conditions, fixed=conditions)

    def test_targets_are_told_one_by_one(self, log):
        log.target("bare", {"fingerprint": "x"}, ["fingerprint"])
        log.add(record())
        log.target("mine", {"fingerprint": "y"}, ["fingerprint"])
        log.target("mine", {"fingerprint": "y"}, ["fingerprint"])
        assert log.conditions()["targets"] == {
            "bare": {"fingerprint": "x"}, "mine": {"fingerprint": "y"},
        }  # fmt: skip
        assert len(list(log.records())) == 1
        with pytest.raises(LogError, match=r"model \(fingerprint was y, here z\)"):
            log.target("mine", {"fingerprint": "z"}, ["fingerprint"])

    def test_a_broken_line_is_named_by_its_number(self, log):
        with log.path.open("a") as stream:
            stream.write("{broken\n")
        with pytest.raises(LogError, match="Line 2"):
            list(log.records())

    def test_a_log_that_is_not_there(self, tmp_path):
        with pytest.raises(LogError, match="cannot be read"):
            Log(tmp_path / "none.jsonl").conditions()

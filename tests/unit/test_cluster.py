"""Work cut up among workers, and put together again, without a cluster to run it on."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from outrider import Engine
from outrider.audit.sampled import audit_samples, audit_tokens
from outrider.audit.spread import MakeAuditor, spread_comparing, spread_drawing
from outrider.cli.main import main
from outrider.engine import cluster
from outrider.engine.cluster import Share, environment, share_of, team_of
from outrider.engine.prompts import PromptRecord
from outrider.errors import UsageError
from outrider.lab.bench import Bench
from outrider.lab.configuration import Configuration
from outrider.lab.record import Record
from outrider.lab.spread import MakeMeasurer, groups, spread_run

TARGET = "toy:vocab=4,seed=1"
PROMPTS = [PromptRecord(str(i), "letters", text) for i, text in enumerate(("abab", "dcba", "aabc"))]
CONFIGURATIONS = [Configuration("ngram"), Configuration("ngram", "rejection")]


class Shuffled:
    """Workers in this process, whose results come in another order than their jobs."""

    def __init__(self, made: list[Any]) -> None:
        for number, one in enumerate(made):
            one.worker = f"here/{number}"
        self.made = made
        self.jobs: list[tuple[str, tuple[Any, ...]]] = []

    def map(self, method: str, jobs: Any) -> Any:
        order = list(enumerate(jobs))
        random.Random(1).shuffle(order)
        for turn, (number, job) in enumerate(order):
            self.jobs.append((method, job))
            yield number, getattr(self.made[turn % len(self.made)], method)(*job)


class TestShares:
    def test_each_worker_gets_as_much_as_the_others(self):
        assert share_of([{"CPU": 16}], 1) == Share(16)
        assert share_of([{"CPU": 16}], 3) == Share(5)
        assert share_of([{"CPU": 4}, {"CPU": 4}], 2) == Share(4)
        # Three on the large one and one on the small one.
        assert share_of([{"CPU": 12}, {"CPU": 4}], 4) == Share(4)

    def test_gpus_are_shared_out_where_there_are_enough(self):
        nodes = [{"CPU": 8, "GPU": 2.0}, {"CPU": 8, "GPU": 2.0}]
        assert share_of(nodes, 4) == Share(4, 1)
        assert share_of(nodes, 5) == Share(2, 0)
        assert share_of(nodes, 4, "cpu") == Share(4, 0)
        # The machine without a GPU has no place for a worker that needs one.
        assert share_of([{"CPU": 2, "GPU": 2.0}, {"CPU": 64}], 2) == Share(1, 1)

    @pytest.mark.parametrize(
        ("nodes", "count", "device"),
        [([{"CPU": 2}], 3, None), ([], 1, None), ([{"CPU": 8, "GPU": 1}], 2, "cuda")],
    )
    def test_more_workers_than_places_are_refused(self, nodes, count, device):
        with pytest.raises(UsageError, match=f"{count} workers need a"):
            share_of(nodes, count, device)

    def test_by_default_each_machine_has_one_worker(self):
        """On the smallest one it must fit, and the largest must not have two."""
        assert team_of([{"CPU": 16}, {"CPU": 4}], None) == (2, Share(4))
        assert team_of([{"CPU": 16}, {"CPU": 4}], 5) == (5, Share(4))
        with pytest.raises(UsageError, match="need a processor"):
            team_of([], None)

    def test_a_worker_keeps_to_its_processors(self):
        assert environment(Share(3)) == {
            "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3", "NUMBA_NUM_THREADS": "3"
        }  # fmt: skip


@pytest.mark.parametrize("command", ["bench", "audit"])
def test_a_missing_ray_is_told_with_what_to_install(command, monkeypatch, capsys):
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as end:
        main([command, "--target", TARGET, "--ray", *(["--sampled"] * (command == "audit"))])
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert "needs ray" in told
    assert "outrider[ray]" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["bench", "--ray", "--peer", "transformers"], "Peers run on one machine"),
        (["audit", "--ray", "--endpoint", "http://a", "--against", "http://b"], "from one machine"),
        (["serve", "--replicas", "2"], "Add --ray"),
        (["serve", "--ray", "--replicas", "2", "--max-replicas", "3"], "a fixed number"),
        (["serve", "--ray", "--min-replicas", "4", "--max-replicas", "3"], "more than"),
        (["serve", "--ray", "--otlp", "http://a"], "--otlp is for one process"),
    ],
)
def test_what_does_not_go_together_is_told_before_a_cluster_is_joined(arguments, told, capsys):
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--target", TARGET])
    assert end.value.code == 2
    assert told in capsys.readouterr().err


class TestAudits:
    @staticmethod
    def team(rule: str, request: dict[str, Any]) -> tuple[Engine, list[list[int]], Shuffled]:
        load = {"drafter": "ngram", "rule": rule, "draft_length": 2}
        engine = Engine.load(TARGET, **load)
        ids = [engine.encode(text) for text in ("abab", "aaa")]
        make = MakeAuditor(TARGET, load, ids, request)
        return engine, ids, Shuffled([make() for _ in range(3)])

    def test_samples_are_those_of_one_machine(self):
        request = {"max_tokens": 3, "temperature": 1.0}
        engine, ids, team = self.team("rejection", request)
        options = {"seed": 5, "request": request, "looks": 3}
        alone = audit_samples(engine, ids, 120, **options)
        spread = audit_samples(engine, ids, 120, drawing=spread_drawing(team, 3), **options)
        assert spread.to_dict() == alone.to_dict()
        assert spread.drafted_tokens
        seeds = [draw.seed for _, (draws,) in team.jobs for draw in draws]
        assert sorted(seeds) == list(range(5, 5 + len(seeds)))
        assert len(team.jobs) > 3 * len(alone.looks)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_tokens_are_compared_as_on_one_machine(self, temperature):
        request = {"max_tokens": 8, "temperature": temperature}
        engine, ids, team = self.team("auto", request)
        options = {"seed": 9, "request": request}
        alone = audit_tokens(engine, ids, 40, **options)
        spread = audit_tokens(engine, ids, 40, comparing=spread_comparing(team, 3), **options)
        assert spread == alone
        assert spread.verdict == "consistent"
        assert spread.compared == (2 if temperature == 0 else 80)


class TestBenches:
    OPTIONS: ClassVar[dict[str, Any]] = {
        "max_tokens": 6,
        "repeats": 2,
        "temperatures": (0.0, 1.0),
        "batches": (1, 2),
    }

    @staticmethod
    def untimed(record: Record) -> Record:
        rounds = [replace(one, draft_s=0, score_s=0, total_s=0) for one in record.rounds]
        return replace(
            record, prefill_s=0.0, ttft_s=0.0, total_s=0.0, rounds=rounds, worker="",
            peak_bytes=None, cache_bytes=None,
        )  # fmt: skip

    def spread(self, done: set[Any]) -> list[Record]:
        make = MakeMeasurer(TARGET, {"drafter": "none"}, PROMPTS, CONFIGURATIONS, self.OPTIONS)
        team = Shuffled([make(), make()])
        return list(spread_run(team, len(PROMPTS), self.OPTIONS["batches"], done))

    def test_every_generation_is_made_once_and_is_the_same(self):
        engine = Engine.load(TARGET, drafter="none")
        alone = {
            one.key: self.untimed(one)
            for one in Bench(engine, PROMPTS, CONFIGURATIONS, **self.OPTIONS).run()
        }
        spread = self.spread(set())
        assert len(spread) == len(alone)
        assert {one.key: self.untimed(one) for one in spread} == alone

    def test_all_of_a_prompt_is_measured_by_one_worker(self):
        by_prompt: dict[int, set[str]] = {}
        for one in self.spread(set()):
            by_prompt.setdefault(one.prompt, set()).add(one.worker)
        assert {len(names) for names in by_prompt.values()} == {1}
        assert set().union(*by_prompt.values()) == {"here/0", "here/1"}

    def test_what_is_done_is_left_out(self):
        every = self.spread(set())
        done = {one.key for one in every[::2]}
        assert {one.key for one in self.spread(done)} == {one.key for one in every} - done

    def test_prompts_that_share_a_batch_are_not_parted(self):
        assert groups(7, [2, 3]) == [range(6), range(6, 7)]
        assert groups(2, [1]) == [range(1), range(1, 2)]

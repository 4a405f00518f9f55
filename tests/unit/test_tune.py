"""The search for the fastest way, on machines whose speeds are known; and profiles."""

from __future__ import annotations

import json
import random

import pytest

from outrider import Engine
from outrider.engine import profile as profiles
from outrider.engine.profile import Choice, Profile, find_profile, forget_profile, write_profile
from outrider.errors import UsageError
from outrider.lab.configuration import Configuration
from outrider.lab.tune import candidates, tune
from outrider.models.fingerprint import Fingerprint
from outrider.models.tokenizer import ToyTokenizer
from outrider.models.toy import ToyModel


def machine(speeds: dict[str, float], noise: float = 0.0, spread: float = 0.0, seed: int = 1):
    """Seconds a token: each way's speed, prompts of different difficulty, a drift that falls on
    all, and noise; and a count of what was timed."""
    chance = random.Random(seed)
    easy = {}
    asked = []

    def clock(way, prompt):
        asked.append((way.label, prompt))
        here = easy.setdefault((way.label, prompt), chance.gauss(0.0, spread))
        drift = 1 + 0.3 * (len(asked) % 97) / 97
        speed = 1.0 if way.is_plain else speeds[way.label] * 2.718**here
        return drift / speed * (1 + abs(chance.gauss(0.0, noise)))

    clock.asked = asked
    return clock


WAYS = {f"ngram,draft-length={n}": Configuration("ngram", "auto", n) for n in range(1, 13)}


@pytest.mark.parametrize("seed", range(8))
def test_the_known_best_is_found(seed):
    speeds = {label: 1.0 + 0.05 * i for i, label in enumerate(WAYS)}
    clock = machine(speeds, noise=0.02, spread=0.03, seed=seed)
    found = tune(list(WAYS.values()), clock, 96, seed=seed)
    # Within three per cent of the best: its neighbour is five per cent slower.
    assert speeds[found.leader.configuration.label] >= 1.55 / 1.05
    assert found.best is found.leader
    assert found.leader.low < speeds[found.leader.configuration.label] * 1.03
    assert found.leader.high > speeds[found.leader.configuration.label] * 0.97


def test_less_is_timed_than_by_an_exhaustive_search():
    clock = machine(dict.fromkeys(WAYS, 1.1))
    tune(list(WAYS.values()), clock, 64)
    assert len(clock.asked) < 0.5 * 64 * (1 + len(WAYS))
    assert len(set(clock.asked)) == len(clock.asked)


@pytest.mark.parametrize("seed", range(5))
def test_plain_stays_where_nothing_is_faster(seed):
    speeds = {label: 0.9 + 0.008 * i for i, label in enumerate(WAYS)}
    found = tune(list(WAYS.values()), machine(speeds, noise=0.05, seed=seed), 48, seed=seed)
    assert found.best is None
    assert found.choice(0.95) == Choice("none", prompts=len(found.leader.ratios), level=0.95)


def test_winning_by_luck_alone_is_rarely_called_certain():
    ways = list(WAYS.values())
    called = 0
    for seed in range(60):
        clock = machine(dict.fromkeys(WAYS, 1.0), spread=0.2, seed=seed)
        called += tune(ways, clock, 48, seed=seed).best is not None
    assert called <= 5  # one side of a 95 % interval: 1.5 expected, more than 5 once in 250


@pytest.mark.parametrize("prompts", [6, 12, 48])
@pytest.mark.parametrize("count", [1, 8, 24])
def test_noise_is_not_called_certain_whatever_the_sizes(prompts, count):
    ways = [Configuration("ngram", "auto", n) for n in range(1, count + 1)]
    chance, called = random.Random(prompts), 0
    for seed in range(60):
        found = tune(ways, lambda way, prompt: chance.lognormvariate(0.0, 0.1), prompts, seed=seed)
        called += found.best is not None
    assert called <= 5
    assert prompts > 6 or not called  # three to choose by, three to judge by: too few


def test_the_winner_is_judged_by_prompts_that_it_was_not_chosen_by():
    clock = machine({label: 1 + i / 10 for i, label in enumerate(WAYS)})
    found = tune(list(WAYS.values()), clock, 32)
    assert found.leader.configuration.label == list(WAYS)[-1]
    before = {prompt for label, prompt in clock.asked[: -2 * 16]}
    last = {prompt for label, prompt in clock.asked[-2 * 16 :]}
    assert (len(before), len(last), before & last) == (16, 16, set())
    assert len(found.leader.ratios) == 16


def test_rounds_halve_and_double():
    clock = machine({label: 1 + i / 10 for i, label in enumerate(WAYS)})
    told = []
    found = tune(list(WAYS.values()), clock, 32, told=told.append)
    assert [len(r.standings) for r in told] == [12, 6, 3, 1]
    assert [(r.prompts, r.seen) for r in told] == [(4, 4), (8, 12), (4, 16), (16, 32)]
    assert found.rounds == told
    assert not found.stopped


def test_a_deadline_ends_it_after_a_whole_round():
    found = tune(list(WAYS.values()), machine(dict.fromkeys(WAYS, 1.2)), 32, deadline_s=0.0)
    assert found.stopped
    assert [r.prompts for r in found.rounds] == [4]


def test_two_of_one_label():
    with pytest.raises(UsageError, match="called 'ngram'"):
        tune([Configuration("ngram"), Configuration("ngram")], lambda way, prompt: 1.0, 4)


def test_candidates_are_ways_that_an_engine_takes():
    engine = Engine(ToyModel.random(4, 1), ToyTokenizer(4), drafter="none")
    for greedy in (True, False):
        ways = list(candidates(engine, greedy))
        assert len({way.label for way in ways}) == len(ways) >= 8
        for way in ways:
            engine.generate(
                "abab", max_tokens=3, temperature=0.0 if greedy else 1.0, drafter=way.drafter,
                rule=way.rule, draft_length=way.draft_length,
            )  # fmt: skip


# --- profiles ------------------------------------------------------------------------------------

PRINT = Fingerprint("w", "t", "c", "", "int8")
TOY = ToyModel.random(4, 1)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path


def a_profile(**choices) -> Profile:
    return Profile("toy", PRINT.to_dict(), profiles.here(TOY), about={"limit": 2}, **choices)


def test_what_is_written_is_found_again_for_this_target_on_this_machine(monkeypatch):
    made = a_profile(greedy=Choice("ngram", "auto", 4, 1.3, 1.2, 1.4, 24))
    path = write_profile(made)
    assert find_profile(PRINT, TOY) == made
    assert find_profile(Fingerprint("other", "t", "c", "", "int8"), TOY) is None
    assert find_profile(None, TOY) is None
    assert not list(path.parent.glob("*.part"))
    assert find_profile(PRINT, object()) is None  # another runtime
    monkeypatch.setattr(profiles, "cpu_name", lambda: "another processor")
    assert find_profile(PRINT, TOY) is None


def test_a_broken_profile_is_told_with_its_name():
    path = write_profile(a_profile())
    sound = json.loads(path.read_text())
    wrong = [
        sound | {"about": None},
        sound | {"greedy": {"drafter": "ngram", "speedup": "x"}},
        sound | {"greedy": {"drafter": 7}},
        sound | {"greedy": {"drafter": "ngram", "mood": 1}},
    ]
    for text in ("{", json.dumps({"target": "x"}), json.dumps([1]), *map(json.dumps, wrong)):
        path.write_text(text)
        with pytest.raises(UsageError, match=path.name):
            find_profile(PRINT, TOY)


def test_forgetting():
    write_profile(a_profile())
    assert forget_profile(PRINT, TOY)
    assert not forget_profile(PRINT, TOY)
    assert find_profile(PRINT, TOY) is None


def tuned_engine(monkeypatch, **how) -> Engine:
    write_profile(a_profile(
        greedy=Choice("script:1,2,3", "greedy", 2), sampled=Choice("ngram", "rejection", 3)
    ))  # fmt: skip
    monkeypatch.setattr(Engine, "fingerprint", lambda self: PRINT)
    return Engine(ToyModel.random(4, 1), ToyTokenizer(4), **how)


def test_an_engine_uses_its_profile(monkeypatch):
    engine = tuned_engine(monkeypatch)
    cold = engine.generate("abab", max_tokens=4)
    hot = engine.generate("abab", max_tokens=4, temperature=1.0)
    assert (cold.drafter, cold.rule) == ("script", "greedy")
    assert (hot.drafter, hot.rule) == ("ngram", "rejection")


def test_whoever_asks_for_something_gets_that(monkeypatch):
    engine = tuned_engine(monkeypatch)
    assert engine.generate("abab", max_tokens=4, drafter="suffix").drafter == "suffix"
    assert engine.generate("abab", max_tokens=4, plain=True).drafter == "none"
    hot = engine.generate("abab", max_tokens=4, temperature=1.0, rule="coupled")
    assert hot.rule == "coupled"
    named = tuned_engine(monkeypatch, drafter="suffix")
    assert named.generate("abab", max_tokens=4).drafter == "suffix"
    ruled = tuned_engine(monkeypatch, rule="coupled")
    assert ruled.generate("abab", max_tokens=4, temperature=1.0).rule == "coupled"


def test_a_profile_of_plain_decoding(monkeypatch):
    write_profile(a_profile(greedy=Choice("none")))
    monkeypatch.setattr(Engine, "fingerprint", lambda self: PRINT)
    out = Engine(ToyModel.random(4, 1), ToyTokenizer(4)).generate("abab", max_tokens=4)
    assert out.trace.summary()["drafted_tokens"] == 0


def test_a_drafter_that_is_gone_is_told_with_where_it_came_from(monkeypatch):
    write_profile(a_profile(greedy=Choice("model:no/such/model")))
    monkeypatch.setattr(Engine, "fingerprint", lambda self: PRINT)
    engine = Engine(ToyModel.random(4, 1), ToyTokenizer(4))
    with pytest.raises(UsageError, match="outrider tune chose --drafter model:no/such/model"):
        engine.generate("abab", max_tokens=4)
    assert engine.generate("abab", max_tokens=4, drafter="ngram").drafter == "ngram"


def test_what_is_tuned_does_not_follow_what_was_tuned_before(monkeypatch):
    engine = tuned_engine(monkeypatch)
    engine.follows_profile = False
    assert engine.generate("abab", max_tokens=4).drafter == "ngram"

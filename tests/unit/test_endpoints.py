"""The audit of two servers, against real servers of toys that can misbehave."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack

import pytest

from outrider.audit.endpoints import audit_endpoints
from outrider.audit.endpoints.answers import Answer, words
from outrider.audit.endpoints.client import base_url
from outrider.audit.endpoints.logprobs import compare_logprobs
from outrider.audit.endpoints.pace import LONGEST_HOLD_S, Pace
from outrider.errors import EndpointError, UsageError
from tests.contract.test_exact_laws import NoResidual
from tests.servers import ToyServer, toy_engine

pytestmark = pytest.mark.usefixtures("one_thread")

HOT = {"max_tokens": 2, "temperature": 1.0}
COLD = {"max_tokens": 6, "temperature": 0.0}
KEY = "sk-secret-0123"


class FakeClock:
    """Sleeping takes no time."""

    def __init__(self):
        self.time = 0.0
        self.sleeps = []

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds
        self.sleeps.append(seconds)


@pytest.fixture
def serve():
    """Starts servers: a plain one and a speculative one, with options for the latter."""
    with ExitStack() as stack:

        def start(rule="rejection", eos=(), plain=None, **options):
            return tuple(
                stack.enter_context(server)
                for server in (
                    ToyServer(toy_engine(eos=eos), plain=True, **(plain or {})),
                    ToyServer(toy_engine(rule, eos=eos), plain=False, **options),
                )
            )

        yield start


def audit(pair, samples=3, prompts=("ab",), request=HOT, **options):
    plain, ours = pair
    options.setdefault("clock", FakeClock())
    return audit_endpoints(
        ours.url, plain.url, list(prompts), samples, request=request, seed=7, **options
    )


# --- verdicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
def test_honest_servers_are_not_told_apart(serve, chat):
    pair = serve()
    told = []
    report = audit(
        pair, 150, ("ab", "ba"), chat=chat, concurrency=4, model="toy",
        advance=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert report.verdict != "different"
    assert report.symbols == "tokens"
    assert (report.requests, report.retries, report.resumed) == (600, 0, 0)
    assert told == [(i + 1, 600) for i in range(600)]
    assert report.logprobs.compared > 20
    assert report.logprobs.largest.difference < 1e-9
    path = "/v1/chat/completions" if chat else "/v1/completions"
    seeds = []
    for server in pair:
        assert set(server.paths) == {path}
        assert all(r["model"] == "toy" and r["max_tokens"] == 2 for r in server.requests)
        seeds += [r["seed"] for r in server.requests]
    assert sorted(seeds) == list(range(7, 607))
    found = json.loads(json.dumps(report.to_dict()))
    assert found["method"] == "endpoints"
    assert found["plain_samples"] == found["speculative_samples"] == 300
    assert {c["name"] for c in found["comparisons"]} >= {"position 1", "positions 2-3", "whole"}
    shown = {
        found["names"][str(i)] for b in found["comparisons"][0]["laws"] for i in b["token_ids"]
    }
    assert shown <= set("abcd")
    assert "<finish_reason: length>" in found["names"].values()


def test_a_biased_server_is_different_and_the_bias_is_located(serve):
    report = audit(serve(NoResidual()), 600, concurrency=2)
    assert report.verdict == "different"
    assert report.statistics.worst.adjusted_p < 1e-3
    at_odds = report.statistics.worst.at_odds[0]
    assert abs(at_odds.z) > 3
    assert {report.names[i] for i in at_odds.token_ids} & set("abcd")


def test_an_ending_that_is_missed_is_different(serve):
    pair = serve(eos=(0,), options={"ignore_eos": True})
    report = audit(pair, 150, request={**HOT, "max_tokens": 4})
    assert report.verdict == "different"
    assert "<finish_reason: stop>" in report.names.values()


def test_without_tokens_on_one_side_both_are_compared_by_words(serve):
    plain, ours = serve(logprobs=False)
    report = audit((plain, ours), 20)
    assert (report.symbols, report.logprobs.compared) == ("words", 0)
    # One request was refused for its logprobs, and none asked for them after that.
    assert len(ours.requests) == 21
    assert [r.get("logprobs") for r in ours.requests] == [1, *[None] * 20]
    assert all(r["logprobs"] == 1 for r in plain.requests)


def test_logprobs_beyond_the_tolerance_are_different(serve):
    def change(choice):
        choice["logprobs"]["token_logprobs"][1] -= 0.7

    report = audit(serve(change=change), 40)
    assert report.statistics.verdict != "different"
    assert report.verdict == "different"
    gap = report.logprobs.largest
    assert gap.difference == pytest.approx(0.7)
    assert len(gap.prefix) == 1
    assert gap.plain - gap.speculative == pytest.approx(0.7)


@pytest.mark.parametrize("value", [0.0, 1.5, float("nan")])
def test_logprobs_that_are_none_are_told(serve, value):
    def change(choice):
        choice["logprobs"]["token_logprobs"] = [value] * len(choice["logprobs"]["tokens"])

    report = audit(serve(change=change), 20)
    assert report.verdict != "different"
    assert report.logprobs.compared == 0
    (told,) = report.logprobs.told
    assert "speculative server's 40 logprobs" in told


def test_logprobs_are_compared_after_the_same_tokens_only():
    def answer(side, tokens, logprobs, prompt=0):
        return Answer(side, prompt, 0, "".join(tokens), tuple(tokens), tuple(logprobs), "length")

    found = compare_logprobs(
        [
            answer("plain", "ab", (-1.0, -2.0)),
            answer("plain", "cb", (-1.5, -4.0)),
            answer("speculative", "ab", (-1.1, -2.3)),
            answer("speculative", "bb", (-1.0, -9.0)),
            answer("speculative", "ab", (-5.0, -2.0), prompt=1),
        ]
    )
    assert found.compared == 2
    assert (found.largest.prompt, found.largest.prefix, found.largest.token) == (0, ("a",), "b")
    assert found.largest.difference == pytest.approx(0.3)
    assert not found.different


# --- greedy ---------------------------------------------------------------------------------------


def test_greedy_outputs_are_asked_for_once_and_equal(serve):
    report = audit(serve("greedy"), 50, ("a", "b", "c"), COLD)
    assert (report.verdict, report.compared, report.requests) == ("consistent", 3, 6)
    assert (report.statistics, report.differences) == (None, ())
    assert json.loads(json.dumps(report.to_dict()))["differences"] == []


def test_a_greedy_difference_is_located(serve):
    def change(choice):
        lps = choice["logprobs"]
        lps["tokens"][3] = "x"
        lps["token_logprobs"][3] -= 0.2

    report = audit(serve("greedy", change=change), 1, ("a", "b"), COLD)
    assert report.verdict == "different"
    assert [(d.prompt, d.position, d.speculative) for d in report.differences] == [
        (0, 3, "x"), (1, 3, "x")
    ]  # fmt: skip
    assert report.differences[0].gap == pytest.approx(0.2)


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("trick", [429, 500, 503, "drop"])
def test_what_may_pass_is_tried_again(serve, trick):
    ours = (pair := serve())[1]
    ours.tricks.extend([trick, trick])
    clock = FakeClock()
    report = audit(pair, 3, clock=clock)
    assert (report.requests, report.retries) == (8, 2)
    assert clock.sleeps == [0.5, 1.0]
    assert ours.requests[0] == ours.requests[1] == ours.requests[2]


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(("said", "waited"), [("3", 3.0), ("9999", LONGEST_HOLD_S), ("-1", None)])
def test_retry_after_is_honoured_and_bounded(serve, status, said, waited):
    ours = (pair := serve())[1]
    ours.tricks.append((status, {"Retry-After": said}, b""))
    clock = FakeClock()
    assert audit(pair, 2, clock=clock).retries == 1
    assert clock.sleeps == ([] if waited is None else [waited])


@pytest.mark.parametrize("trick", [500, "drop"])
def test_retries_are_bounded(serve, trick):
    plain, ours = pair = serve()
    ours.always = trick
    with pytest.raises(EndpointError, match="within 3 tries"):
        audit(pair, 5, retries=2)
    assert (len(plain.requests), len(ours.requests)) == (1, 3)


def test_a_server_that_is_not_there_is_told(serve):
    plain, ours = serve()
    ours.__exit__()
    with pytest.raises(EndpointError, match="ConnectError"):
        audit((plain, ours), 1, retries=1)


@pytest.mark.parametrize(
    ("trick", "message"),
    [
        ("not json", "an answer in JSON; got 6 bytes"),
        ("no choices", "an answer with 'choices'"),
        ("huge", "at most 1000000 bytes"),
        ("redirect", "status 302, pointing to http://127.0.0.1:9/"),
        ((401, {}, b'{"error": "bad \x1b[1m key"}'), "status 401, .*Check the API key"),
        ((404, {}, b'{"detail": "no such model"}'), "status 404, no such model"),
        ((418, {}, b"x" * 5000), "x" * 300 + " Check"),
    ],
)
def test_what_cannot_pass_is_an_error_at_once(serve, trick, message):
    ours = (pair := serve())[1]
    ours.always = trick
    with pytest.raises(EndpointError, match=message):
        audit(pair, 4)
    # A 404 may be about the logprobs: that is tried out once.
    assert len(ours.requests) == (2 if isinstance(trick, tuple) and trick[0] == 404 else 1)


def test_the_key_is_sent_and_leaked_nowhere(serve, tmp_path):
    ours = (pair := serve())[1]
    log = tmp_path / "log"
    ours.tricks.extend(["ok", (400, {}, f'{{"error": "{KEY}"}}'.encode()), (401, {}, KEY.encode())])
    with pytest.raises(EndpointError, match=r"401, \*\*\*") as caught:
        audit(pair, 4, api_key=KEY, log=log)
    assert KEY not in str(caught.value)
    assert KEY not in log.read_text()
    for server in pair:
        assert {h["Authorization"] for h in server.headers} == {f"Bearer {KEY}"}
    with pytest.raises(UsageError) as refused:
        audit(pair, 4, api_key=f"{KEY}\nX: y")
    assert KEY not in str(refused.value)


def test_the_rate_is_kept(serve):
    clock, times = FakeClock(), []
    note = {"on_request": lambda: times.append(clock.now())}
    audit(serve(plain=note, **note), 4, rate=4.0, clock=clock)
    assert times == [i / 4 for i in range(8)]


def test_a_pace_holds_all():
    clock = FakeClock()
    pace = Pace(None, clock.now, clock.sleep)
    pace.wait()
    pace.hold(3.0)
    pace.wait()
    pace.wait()
    assert clock.sleeps == [3.0]


# --- the log --------------------------------------------------------------------------------------


def test_an_audit_that_was_broken_off_asks_only_for_what_is_missing(serve, tmp_path):
    plain, ours = pair = serve()
    log = tmp_path / "log.jsonl"
    whole = audit(pair, 6, ("a", "b"))
    before = len(plain.requests), len(ours.requests)
    ours.tricks.extend(["ok", "ok", "ok", *["drop"] * 2])
    with pytest.raises(EndpointError):
        audit(pair, 6, ("a", "b"), log=log, retries=1)
    assert len(log.read_text().splitlines()) == 1 + 4 + 3
    with log.open("a") as file:
        file.write('{"text": "' + "x" * 9000)  # half-written, and longer than what follows
    report = audit(pair, 6, ("a", "b"), log=log)
    assert (report.resumed, report.requests) == (7, 24 - 7)
    assert len(plain.requests) - before[0] == 12
    assert len(ours.requests) - before[1] == 12 + 2
    assert report.statistics == whole.statistics
    again = audit(pair, 6, ("a", "b"), log=log)
    assert (again.resumed, again.requests) == (24, 0)
    assert again.statistics == whole.statistics
    # More samples go on from there.
    more = audit(pair, 7, ("a", "b"), log=log)
    assert (more.resumed, more.requests) == (24, 4)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[0]["prompts"] == ["a", "b"]
    assert lines[1].keys() == {
        "side", "prompt", "seed", "kind", "symbols", "text", "finish_reason", "logprobs"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"prompts": ("ba",)}, "prompts"),
        ({"request": {**HOT, "top_p": 0.5}}, "request"),
        ({"chat": True}, "chat"),
        ({"model": "other"}, "model"),
    ],
)
def test_a_log_of_other_conditions_is_refused(serve, tmp_path, change, name):
    pair = serve()
    log = tmp_path / "log"
    audit(pair, 1, log=log)
    kept = log.read_bytes()
    with pytest.raises(UsageError, match=f"begun with another {name}"):
        audit(pair, 1, log=log, **change)
    assert log.read_bytes() == kept


@pytest.mark.parametrize("content", [b"my thesis", b"my thesis\n", b'{"log": 1}\n'])
def test_another_file_is_never_touched(serve, tmp_path, content):
    log = tmp_path / "file"
    log.write_bytes(content)
    with pytest.raises(UsageError, match="is no log"):
        audit(serve(), 1, log=log)
    assert log.read_bytes() == content


def test_a_half_written_first_line_and_a_broken_line(serve, tmp_path):
    pair = serve()
    log = tmp_path / "log"
    audit(pair, 2, log=log)
    whole = log.read_bytes()
    log.write_bytes(whole[:30])
    assert audit(pair, 2, log=log).resumed == 0
    assert log.read_bytes() == whole
    log.write_bytes(whole + b"{}\n")
    with pytest.raises(UsageError, match="no answer in line 6"):
        audit(pair, 2, log=log)
    with pytest.raises(UsageError, match="cannot be used"):
        audit(pair, 2, log=tmp_path / "no" / "log")


def test_ctrl_c_leaves_the_log_whole(serve, tmp_path):
    pair = serve()
    log = tmp_path / "log"

    def interrupt(done, total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit(pair, 50, log=log, advance=interrupt, concurrency=3)
    data = log.read_bytes()
    assert data.endswith(b"\n")
    assert len([json.loads(line) for line in data.splitlines()]) >= 6
    report = audit(pair, 50, log=log, concurrency=3)
    assert report.resumed == len(data.splitlines()) - 1
    assert report.requests == 100 - report.resumed


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"samples": 0},
        {"prompts": ()},
        {"prompts": ("",)},
        {"alpha": 1.0},
        {"concurrency": 9},
        {"rate": 0.0},
        {"retries": -1},
        {"request": {}},
        {"request": {**HOT, "n": 2}},
        {"request": {**HOT, "temperature": float("nan")}},
        {"request": {**HOT, "stop": {1}}},
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_asked(serve, change):
    pair = serve()
    with pytest.raises(UsageError):
        audit(pair, **{"samples": 1, **change})
    assert not pair[0].requests
    assert not pair[1].requests


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000", "ftp://a", "file:///etc", "http://", "http://u:p@a", "http://a?k=1",
     "http://a:b", "http://a:99999"],
)  # fmt: skip
def test_urls_that_are_none(url):
    with pytest.raises(UsageError, match="Example: http"):
        base_url(url)


@pytest.mark.parametrize("url", ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"])
def test_urls_with_and_without_v1(url):
    assert base_url(url) == "http://a:1"


@pytest.mark.parametrize("text", ["", "  ", "Hello,  world!\n\n- x", "naïve 日本語 _a1", "\t"])
def test_words_are_the_whole_text(text):
    assert "".join(words(text)) == text


def test_no_thread_is_left(serve):
    pair = serve()
    audit(pair, 3, concurrency=3)
    assert not [t for t in threading.enumerate() if "work" in t.name]

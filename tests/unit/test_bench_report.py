"""The pages of a benchmark: numbers by hand, words, hostile texts, and two runs together."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.core.trace import Round
from outrider.errors import LogError, UsageError
from outrider.lab.record import Log, Record, Run
from outrider.report import bench_pictures as draw
from outrider.report.bench import bench_page, comparison_page
from outrider.report.figures import changes, measured, middle
from outrider.report.gallery import groups
from outrider.report.verdicts import compared, facts, flatten, headline, sorted_out
from tests.simulated import Configuration, records, write_log

EVIL = "<script>alert('x')</script>"
KINDS = {"code": 0.7, "chat": 0.4}


def record(configuration="plain", prompt=0, seconds=1.0, rounds=(), **about):
    """Ten tokens in so many seconds, in rounds of one token each where none are given."""
    rounds = list(rounds) or [plain_round(seconds / 10)] * 10
    told = {
        "kind": "chat", "repeat": 0, "batch": 1, "temperature": 0.0, "seed": 1, "prompt_tokens": 3,
        "token_ids": [5] * 10, "origins": "p" * 10, "finish_reason": "length", "total_s": seconds,
        "rounds": rounds,
    } | about  # fmt: skip
    return Record(configuration=configuration, prompt=prompt, **told)


def plain_round(seconds):
    return Round(0, 0, 0, 1, False, 0.0, seconds, seconds)


def run_of(speeds, **about):
    """Plain decoding in one second a prompt, and each configuration with its speed-ups."""
    some = [record(prompt=i, **about) for i in range(max(map(len, speeds.values())))]
    for name, ratios in speeds.items():
        some += [record(name, i, 1 / ratio, **about) for i, ratio in enumerate(ratios)]
    return Run({"target": "toy"}, some)


PAYS = [1.2, 1.3, 1.4, 1.5, 1.6, 1.7]
COSTS = [0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
UNCLEAR = [0.7, 0.8, 0.9, 1.1, 1.2, 1.3]


class Reader(HTMLParser):
    """Tags in their order, checked to be closed as they were opened; and all text."""

    VOID = frozenset(("meta", "br", "link", "input"))

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A log in which every text that others wrote is hostile."""
    ways = {
        "plain": Configuration(0, 0.0, 0.0),
        f"a{EVIL},draft-length=2": Configuration(2, 0.1, 1.0),
        f"a{EVIL},draft-length=4": Configuration(4, 0.1, 1.0),
    }
    return write_log(
        tmp_path_factory.mktemp("logs") / "bench.jsonl",
        {"target": f"{EVIL}\u202e", EVIL: {"inner": [EVIL]}, "memory_bytes": 2**31},
        configurations=ways,
        kinds={"code": 0.7, f"<b>{EVIL}": 0.4},
        prompts=6,
        tokens=40,
        pieces=(EVIL, "\n", "\u202e", " &amp;", "\ud800"),
    )


@pytest.fixture(scope="module")
def page(hostile):
    return bench_page(hostile, command=f"outrider bench '{EVIL}'")


@pytest.fixture(scope="module")
def two(hostile):
    return comparison_page(hostile, hostile, names=(EVIL, "second"))


def test_numbers_of_rounds_by_hand():
    four = Round(4, 2, 1, 0, True, 0.004, 0.020, 0.026)
    two = Round(2, 2, 0, 1, False, 0.002, 0.018, 0.022)
    ours = record("ngram", rounds=[four, two] * 30 + [plain_round(0.01)] * 20, seconds=1.64)
    (arm,) = (a for a in measured(Run({}, [record(), ours])).arms if not a.is_plain)
    # 60 rounds drafted two or more, and all of them kept two; 30 drafted four, and none kept three.
    assert arm.stood() == [(1, 1.0), (2, 1.0), (3, 0.0)]
    draft, verify, rest = arm.budget(per_token=False)
    assert draft == pytest.approx(30 * 6 / 80)
    assert verify == pytest.approx((30 * 38 + 20 * 10) / 80)
    assert rest == pytest.approx(30 * (48 - 6 - 38) / 80)
    tokens = 30 * 6 + 20
    assert arm.budget(per_token=True) == pytest.approx(
        tuple(80 / tokens * ms for ms in (draft, verify, rest))
    )


def test_the_cost_of_rows_takes_rounds_of_all_configurations_and_leaves_rare_widths_out():
    rounds = [Round(3, 0, 1, 0, True, 0.0, s / 1e3, 0.1) for s in [20, 30, 40] * 10]
    rare = [Round(7, 0, 1, 0, True, 0.0, 9.0, 9.0)]
    run = Run({}, [record(prompt=i) for i in range(2)] + [record("x", rounds=rounds + rare)])
    points = dict(measured(run).costs()[1])
    assert set(points) == {1, 4}
    assert (points[1].median, points[4].median) == pytest.approx((100, 30))


def test_speedups_are_of_medians_over_repeats_against_plain_in_the_same_setting():
    some = [record(repeat=i, seconds=s) for i, s in enumerate((1.0, 2.0, 9.0))]
    some += [record("x", repeat=i, seconds=s) for i, s in enumerate((0.5, 1.0, 7.0))]
    some += [record(temperature=0.7, seconds=8.0), record("x", temperature=0.7, seconds=2.0)]
    arms = {arm.label: arm for arm in measured(Run({}, some)).arms}
    assert arms["x, temperature 0"].ratios == {0: pytest.approx(2.0)}
    assert arms["x, temperature 0.7"].ratios == {0: pytest.approx(4.0)}
    assert arms["plain, temperature 0"].ratios == {}


@pytest.mark.parametrize(
    ("speeds", "text", "tone"),
    [
        ({"x": PAYS}, "Speculation pays: 1.45\xa0× plain speed", "faster"),
        ({"x": COSTS}, "Speculation does not pay here", "slower"),
        ({"x": UNCLEAR}, "No gain can be told", "unclear"),
        ({"x": PAYS[:5]}, "Too few prompts to tell", "unclear"),
        ({"plain": []}, "No comparison", "unclear"),
    ],
)
def test_headlines(speeds, text, tone):
    run = run_of(speeds) if "x" in speeds else Run({}, [record()])
    found = headline(measured(run))
    assert (found.text, found.tone) == (text, tone)


def test_the_fastest_stands_first_and_what_costs_is_told():
    run = measured(run_of({"good": PAYS, "bad": COSTS, "so so": UNCLEAR}))
    told = headline(run).sentence
    assert "With good, the median of 6 prompts runs at 1.45\xa0×" in told
    assert "fastest of 3 configurations; 1 of them is slower than plain decoding" in told
    sorted_ = sorted_out(run, run.drafted)
    assert [(side.word, [arm.label for arm in arms]) for side, arms in sorted_] == [
        ("Pays", ["good"]), ("No clear difference", ["so so"]), ("Slower than plain", ["bad"]),
    ]  # fmt: skip
    values = {fact.name: fact.value for fact in facts(run)}
    assert values["prompts slower than plain"] == "0 of 6"
    assert values["worst prompt"] == "1.20\xa0×"
    assert values["outputs with plain’s tokens"] == "18 of 18"


def test_draft_lengths_make_a_family_by_conditions_or_by_labels():
    lengths = {f"n,draft-length={k}": [1 + k / 10] * 6 for k in (1, 3, 2)}
    run = run_of({**lengths, "n": [1.05] * 6, "other": [1.5] * 6})
    told = [{"label": "mine", "drafter": "n", "rule": "auto", "draft_length": 9}]
    more = [record("mine", i, 0.1) for i in range(6)]
    found = measured(Run({"configurations": told}, [*run.records, *more]))
    ((_, families, base),) = found.sweeps()
    assert {name: sorted(arm.length for arm in arms) for name, arms in families.items()} == {
        "n": [1, 2, 3, 9]
    }
    assert base is not None
    assert base.is_plain
    assert [arm.label for arm in found.best_lengths(5)] == ["mine", "other"]
    assert [arm.label for arm in found.best_lengths(1)] == ["mine"]


def test_two_runs_are_compared_prompt_by_prompt_under_the_prompts_names():
    first = run_of({"x": PAYS, "only here": PAYS})
    # The same prompts in another order, twice as fast, plain decoding four times.
    turned = [
        replace(
            r, prompt=5 - r.prompt, total_s=r.total_s / (4 if r.configuration == "plain" else 2)
        )
        for r in run_of({"x": PAYS}).records
    ]
    names = [f"prompt {i}" for i in range(6)]
    runs = (
        measured(Run({"prompt_ids": names, "seed": 1, "command": "a"}, first.records)),
        measured(Run({"prompt_ids": names[::-1], "seed": 2, "command": "b"}, turned)),
    )
    found = {change.second.label: change for change in changes(*runs)}
    assert set(found) == {"plain", "x"}
    assert found["x"].speed == {name: pytest.approx(2.0) for name in names}
    assert found["x"].gain == {name: pytest.approx(0.5) for name in names}
    assert found["x"].to_dict()["speedup_ratio"] == pytest.approx(
        {"median": 0.5, "low": 0.5, "high": 0.5}
    )
    told = compared(list(found.values()), runs)
    assert (told.text, told.tone) == ("The second run is faster: 2.00\xa0×", "faster")
    assert "0.50\xa0× the first one’s" in told.sentence
    assert "differ in prompt ids, seed:" in told.sentence  # and in the command, as runs do


def test_a_run_against_itself_and_runs_without_anything_in_common():
    one, other = measured(run_of({"x": PAYS})), measured(run_of({"y": PAYS}, temperature=1.0))
    assert compared(changes(one, one), (one, one)).text == "No difference can be told"
    assert compared(changes(one, other), (one, other)).text == "Nothing to compare"
    assert middle([1.0] * 5) is None
    few = measured(run_of({"x": PAYS[:3]}))
    assert compared(changes(few, few), (few, few)).text == "Too few prompts to tell"


@pytest.mark.parametrize("which", ["page", "two"])
def test_pages_are_whole_and_texts_are_texts(which, request):
    html = request.getfixturevalue(which)
    html.encode()  # the lone surrogate is spelt out
    read = Reader(html)
    scripts = [attributes for tag, attributes in read.tags if tag == "script"]
    assert scripts == [{}]  # its own, inline
    assert "<script>alert" not in html
    assert any(EVIL in text for text in read.texts)
    assert "\u202e" not in html
    assert not [1 for _, attributes in read.tags for name in attributes if name.startswith("on")]
    # Nothing is loaded from anywhere.
    for _, attributes in read.tags:
        for name in ("src", "href", "action", "xlink:href", "srcset"):
            assert attributes.get(name, "#").startswith("#")
    assert "@import" not in html
    assert set(re.findall(r"url\((.)", html)) <= {"#"}


@pytest.mark.parametrize("which", ["page", "two"])
def test_only_the_script_of_the_page_may_run(which, request):
    html = request.getfixturevalue(which)
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'\"" in html.replace("&#43;", "+")
    assert "default-src 'none'" in html


@pytest.mark.parametrize("which", ["page", "two"])
def test_pictures_have_words_and_ids_of_their_own(which, request):
    html = request.getfixturevalue(which)
    read = Reader(html)
    ids = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", html)) <= set(ids)
    assert set(re.findall(r'href="#([^"]+)"', html)) <= set(ids)
    pictures = [a for tag, a in read.tags if tag == "svg" and a.get("class") == "picture"]
    assert len(pictures) > 5
    assert all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in pictures)
    # All colours are the page's: a stand-in that is left would be black on black in the dark.
    assert not re.findall(r"#0[0-9a-f]0[0-9a-f]0[0-9a-f]\b", html)


def test_a_page_has_its_parts_and_is_the_same_each_time(page, hostile):
    for title in (
        "every prompt a dot", "How deep drafts stand", "Speed by draft length",
        "Speed-up along the output", "Speed-up where the target is sure",
        "Drafts kept where the target is sure", "Time for each token", "Time for each round",
        "What a pass costs", "The text, token by token", "All configurations", "Conditions",
    ):  # fmt: skip
        assert title in page
    assert '<th scope="row">memory</th><td>2 GiB</td>' in page
    assert page == bench_page(hostile, command=f"outrider bench '{EVIL}'")


def test_tokens_are_coloured_by_their_origin():
    rounds = [Round(2, 1, 1, 0, True, 0, 0.1, 0.1), Round(1, 1, 0, 1, False, 0, 0.1, 0.1)]
    ours = record(
        "x", rounds=[*rounds, plain_round(0.1)], token_ids=[1, 2, 3, 4, 5], origins="acabp",
        pieces=[" one", "<two>", "\n", " four", " five"], seconds=0.3,
    )  # fmt: skip
    html = bench_page(Run({}, [record(), ours]))
    (text,) = re.findall(r'<div class="output">(.*?)</div>', html, re.DOTALL)
    assert text == (
        ' <span class="accepted">one</span><span class="correction">&lt;two&gt;</span>'
        '<span class="accepted">\n</span> <span class="bonus">four</span> five'
    )


def test_texts_are_of_every_type_before_the_second_of_one(monkeypatch):
    monkeypatch.setattr("outrider.report.bench._TOKENS", 45)
    some = [
        record(name, i, kind=kind, pieces=["x"] * 10)
        for i, kind in enumerate(("a", "a", "b"))
        for name in ("plain", "x")
    ]
    html = bench_page(Run({}, some))
    assert re.findall(r'data-prompt="(\d)"', html) == ["0", "0", "2", "2"]
    assert "1 more prompts are in the log" in html


@pytest.mark.parametrize(
    "some",
    [
        [record()],  # nothing to compare with
        [record("x")],  # no baseline
        [record(), record("x", rounds=[Round(0, 0, 0, 0, False, 0, 0, 0)], token_ids=[])],
        run_of({"x": [1.0]}).records,  # a single prompt
        run_of({"x": PAYS}, kind="").records,
    ],
)
def test_little_makes_a_page_too(some):
    Reader(bench_page(Run({}, some)))
    Reader(comparison_page(Run({}, some), Run({}, some), names=("a", "b")))


def test_differing_conditions_are_marked():
    records_ = run_of({"x": PAYS}).records
    first = Run({"a": 1, "b": {"c": "same", "d": 1}}, records_)
    second = Run({"a": 1, "b": {"c": "same", "d": 2}, "e": True}, records_)
    html = comparison_page(first, second, names=("1", "2"))
    marked = re.findall(r'<tr class="differs"><th scope="row">(.*?) <span', html)
    assert marked == ["b · d", "e"]
    assert "2 of 4 differ" in html


def test_conditions_in_rows():
    assert list(flatten({"command": ["a", "b c"], "n": [1, 2], "x_bytes": 2**20, "e": {}})) == [
        ("command", "a 'b c'"), ("n", "1, 2"), ("x", "1 MiB"), ("e", "–"),
    ]  # fmt: skip


def test_no_records_no_page(tmp_path):
    log = Log(tmp_path / "bench.jsonl")
    log.begin({"target": "toy"})
    with pytest.raises(LogError, match="no measurement yet"):
        bench_page(log)


def test_dots_of_a_full_row_are_all_there():
    offsets = draw._swarm([1.0] * 40, 0.1, 0.2)
    assert len(offsets) == 40
    assert set(offsets) == {0.0, 0.2, -0.2, 0.4, -0.4}


def test_lines_of_one_point_are_not_drawn():
    run = measured(Run({}, [record(), record("x", rounds=[Round(1, 1, 0, 0, False, 0, 0.1, 0.1)])]))
    assert list(pictures_of(run)) == ["Time for each token", "Time for each round"]


def pictures_of(run):
    keys = (str(i) for i in range(99))
    return {f.title: f for _, figures in groups(run, run.drafted, keys) for f in figures}


def test_the_best_length_is_the_fastest():
    speeds = {1: 1.2, 2: 1.5, 4: 1.0}
    run = measured(run_of({f"n,draft-length={k}": [s] * 6 for k, s in speeds.items()}))
    figure = pictures_of(run)["Speed by draft length"]
    assert "best length, 2, the line across plain decoding" in figure.note
    assert "n: best at 2: 12 at 1, 15 at 2, 10 at 4." in figure.svg


def test_parts_of_the_work_are_drawn_with_their_own_figures():
    # The target is sure of the first five tokens: there all drafts stand and a token costs a fifth.
    sure = Round(4, 4, 0, 1, False, 0.0, 0.1, 0.1)
    lost = Round(4, 0, 1, 0, True, 0.0, 0.2, 0.2)
    about = {"entropies": [0.1] * 5 + [2.0] * 5}
    some = [record(prompt=i, **about) for i in range(6)]
    some += [record("x", i, 1.1, [sure] + [lost] * 5, **about) for i in range(6)]
    found = pictures_of(measured(Run({}, some)))
    assert "x: 5 at 0.00–1.05, 0.5 at ≥ 2.00." in found[
        "Speed-up where the target is sure, and where not"
    ].svg  # fmt: skip
    assert "x: 1 at 0.00–1.05, 0 at ≥ 2.00." in found[
        "Drafts kept where the target is sure, and where not"
    ].svg  # fmt: skip


def test_the_command_tells_and_compares_logs(tmp_path):
    first = write_log(tmp_path / "a.jsonl", kinds=KINDS, prompts=4, tokens=24)
    write_log(tmp_path / "b.jsonl", {"seed": 7}, kinds=KINDS, prompts=4, tokens=24, noise=2)
    place = tmp_path / "page.html"
    runner = CliRunner()
    done = runner.invoke(app, ["report", str(first.path), "--html", str(place), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["rows"] == json.loads(
        json.dumps(measured(first).summary.to_dict()["rows"])
    )
    assert "Outrider bench" in place.read_text(encoding="utf-8")
    both = [str(first.path), str(tmp_path / "b.jsonl")]
    done = runner.invoke(app, ["report", *both, "--json"])
    told = json.loads(done.stdout)
    assert {one["configuration"] for one in told["changes"]} >= {"plain", "eagle"}
    assert told["first"]["finished"] == told["second"]["finished"] == 32
    done = runner.invoke(app, ["report", *both])
    assert done.exit_code == 0
    assert "second over first" in done.stdout
    assert "differ in seed" in done.stdout


def test_the_command_refuses_what_it_cannot_do(tmp_path):
    log = write_log(tmp_path / "a.jsonl", kinds=KINDS, prompts=1, tokens=8)
    runner = CliRunner()
    for arguments, problem, kind in (
        ([str(log.path)] * 3, "got 3", UsageError),
        ([str(log.path)] * 2 + ["--csv", str(tmp_path / "x.csv")], "one log; got two", UsageError),
        ([str(tmp_path / "none.jsonl")], "cannot be read", LogError),
        ([str(log.path), "--html", str(tmp_path / "no" / "p.html")], "does not exist", UsageError),
    ):
        done = runner.invoke(app, ["report", *arguments])
        assert isinstance(done.exception, kind)
        assert problem in str(done.exception)
    (tmp_path / "notes.txt").write_text("{}\n")
    done = runner.invoke(app, ["report", str(tmp_path / "notes.txt")])
    assert "no log of measurements" in str(done.exception)


def test_simulated_records_are_like_real_ones():
    for one in records(kinds=KINDS, prompts=2, tokens=30):
        assert sum(r.emitted for r in one.rounds) == len(one.token_ids) == len(one.origins)
        assert one.origins.count("a") == sum(r.accepted for r in one.rounds)

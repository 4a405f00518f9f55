"""``outrider bench`` as a user meets it, on a toy."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli.bench import app
from outrider.cli.main import main
from outrider.cli.report import app as report
from outrider.errors import LogError
from outrider.lab import bench as lab
from outrider.lab.record import Log
from outrider.lab.table import columns
from outrider.registry import METRICS
from tests.patience import HANGS_S
from tests.small_models import new_module, save
from tests.unit.test_adapter import write_adapter

pytestmark = pytest.mark.usefixtures("one_thread")

TOY = ["--target", "toy:vocab=4,seed=1"]
LINES = [
    {"id": "one", "prompt": "abab", "category": "repeat"},
    {"id": "two", "prompt": "cdcdcd", "category": "repeat"},
    {"id": "three", "prompt": "dcba", "category": "other"},
]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def prompts(tmp_path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return str(path)


@pytest.fixture
def asked(prompts) -> list[str]:
    return [*TOY, "--prompts", prompts, "-d", "ngram", "-n", "12"]


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


def test_json(asked):
    found = json.loads(
        run(*asked, "--temperature", "0", "--temperature", "0.7", "--repeats", "2", "--json",
            "--config", "ngram,rule=rejection,label=rej")
    )  # fmt: skip
    assert [(r["configuration"], r["temperature"]) for r in found["rows"]] == [
        ("plain", 0.0), ("rej", 0.0), ("ngram", 0.0), ("plain", 0.7), ("rej", 0.7), ("ngram", 0.7),
    ]  # fmt: skip
    assert (found["finished"], found["planned"]) == (36, 36)
    plain, rej, ngram = found["rows"][:3]
    assert plain["metrics"]["tokens_per_target_call"]["median"] == 1.0
    assert ngram["same"] == {"compared": 6, "same": 6, "promised": True, "parted": []}
    assert (rej["rule"], ngram["rule"]) == ("rejection", "greedy")
    assert ngram["speedup"]["n"] == 3
    assert ngram["speedup"]["low"] <= ngram["speedup"]["median"] <= ngram["speedup"]["high"]
    assert {one["by"] for one in found["strata"]} >= {"kind", "entropy", "temperature"}
    assert len(found["conclusions"]) == 2
    conditions = found["conditions"]
    assert conditions["target"] == TOY[1]
    assert conditions["prompt_ids"] == ["one", "two", "three"]
    assert conditions["request"]["max_tokens"] == 12
    assert conditions["targets"]["bare"]["class"] == "ToyModel"
    # A temperature's speed-up is that of its row.
    by_temperature = {(one["configuration"], one["value"]): one for one in found["strata"]
                      if one["by"] == "temperature"}  # fmt: skip
    assert by_temperature["ngram", "0"]["speedup"] == ngram["speedup"]["median"]
    assert {"torch", "cpu", "threads", "commit", "command"} <= set(conditions)


def test_the_terminal_has_all_of_it_and_ends_in_words(asked):
    shown = run(*asked)
    lines = shown.strip().splitlines()
    assert lines[-1].startswith("At temperature 0, too few prompts to say what pays (ngram ")
    assert "3 of 3" in shown
    assert "= ngram" not in shown
    for word in ("tokens/s", "speed-up", "slower", "95 %", "kept", "by kind of prompt", "repeat",
                 "memory", "weights", "draft", "cache"):  # fmt: skip
        assert word in shown
    assert "\x1b" not in shown


def test_limit_is_a_number_of_each_kind(asked):
    found = json.loads(run(*asked, "--limit", "1", "--json"))
    assert found["conditions"]["prompt_ids"] == ["one", "three"]


def test_with_nothing_named_the_default_is_measured(prompts):
    found = json.loads(run(*TOY, "--prompts", prompts, "-n", "4", "--json"))
    assert [r["configuration"] for r in found["rows"]] == ["plain", "auto"]
    assert found["rows"][1]["drafter"] == "ngram"
    assert "auto = ngram" in run(*TOY, "--prompts", prompts, "-n", "4")


def test_drafters_rules_and_lengths_are_crossed(prompts):
    found = json.loads(
        run(*TOY, "--prompts", prompts, "-n", "4", "-d", "ngram", "-r", "block", "-r", "coupled",
            "-k", "1", "-k", "3", "--temperature", "1", "--json")
    )  # fmt: skip
    assert [r["configuration"] for r in found["rows"]] == [
        "plain", "ngram,rule=block,draft-length=1", "ngram,rule=block,draft-length=3",
        "ngram,rule=coupled,draft-length=1", "ngram,rule=coupled,draft-length=3",
    ]  # fmt: skip


def test_csv_has_a_row_for_each_generation(asked, tmp_path):
    place = tmp_path / "rows.csv"
    run(*asked, "--csv", str(place))
    rows = list(csv.DictReader(io.StringIO(place.read_text())))
    assert len(rows) == 6
    assert list(rows[0]) == columns()
    assert {r["prompt_id"] for r in rows} == {"one", "two", "three"}
    assert all(r["same_tokens_as_plain"] == "True" for r in rows)
    assert all(float(r["tokens_per_s"]) > 0 for r in rows)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


class TestLog:
    def test_a_cut_log_goes_on_and_nothing_is_done_twice(self, asked, tmp_path, monkeypatch):
        place = tmp_path / "bench.jsonl"
        run(*asked, "--log", str(place))
        lines = place.read_text().splitlines(keepends=True)
        assert len(lines) == 2 + 6
        place.write_text("".join(lines[:5]) + lines[5][:40])
        measured = []
        real = lab.Bench._measure

        def counted(self, group, turn):
            measured.extend((one.label, turn.prompt) for _, one in group)
            return real(self, group, turn)

        monkeypatch.setattr(lab.Bench, "_measure", counted)
        found = json.loads(run(*asked, "--log", str(place), "--json"))
        assert len(measured) == 3
        assert found["finished"] == 6
        again = place.read_text().splitlines(keepends=True)
        assert again[:5] == lines[:5]
        keys = [record.key for record in Log(place).records()]
        assert len(set(keys)) == len(keys) == 6
        measured.clear()
        run(*asked, "--log", str(place))
        assert measured == []

    def test_more_repeats_go_on_with_it(self, asked, tmp_path):
        place = tmp_path / "bench.jsonl"
        run(*asked, "--log", str(place))
        before = place.read_text()
        found = json.loads(run(*asked, "--log", str(place), "--repeats", "2", "--json"))
        assert (found["finished"], found["planned"], found["notes"]) == (12, 12, found["notes"])
        assert not any("Not finished" in note for note in found["notes"])
        assert place.read_text().startswith(before)

    @pytest.mark.parametrize(
        ("changed", "word"),
        [
            (["--seed", "3"], "arguments (seed was 0, here 3)"),
            (["-n", "13"], "arguments (max tokens was 12, here 13)"),
            (["--top-k", "2"], "arguments (top k was 0, here 2)"),
            (["-d", "suffix"], "arguments (configurations was ngram, here ngram, suffix)"),
            (["--temperature", "0.5"], "arguments (temperatures was 0.0, here 0.5)"),
            (["--limit", "1"], "prompts (3 there, 2 here)"),
            (["--target", "toy:vocab=4,seed=2"], "model (target was toy:vocab=4,seed=1, here "),
        ],
    )
    def test_other_options_are_another_run(self, asked, tmp_path, changed, word):
        place = tmp_path / "bench.jsonl"
        run(*asked, "--log", str(place))
        before = place.read_text()
        with pytest.raises(LogError, match=re.escape(word)) as caught:
            run(*asked, *changed, "--log", str(place))
        assert "of another run" in str(caught.value)
        assert place.read_text() == before

    def test_a_run_that_cannot_begin_leaves_no_log(self, prompts, tmp_path, capsys):
        place = tmp_path / "bench.jsonl"
        with pytest.raises(SystemExit):
            main(["bench", *TOY, "--prompts", prompts, "-d", "model:toy:vocab=9",
                  "--log", str(place)])  # fmt: skip
        assert "tokenizer" in capsys.readouterr().err
        assert not place.exists()

    def test_other_texts_and_weights_are_told_in_words(self, asked, prompts, tmp_path):
        place = tmp_path / "bench.jsonl"
        run(*asked, "--log", str(place))
        others = [{**LINES[0], "prompt": "dada"}, *LINES[1:]]
        Path(prompts).write_text("".join(json.dumps(line) + "\n" for line in others))
        with pytest.raises(LogError, match=r"prompts \(other texts\)") as caught:
            run(*asked, "--log", str(place))
        assert not re.search("[0-9a-f]{16}", str(caught.value))

    def test_a_report_prints_the_same_and_measures_nothing(self, asked, tmp_path, monkeypatch):
        place, rows = tmp_path / "bench.jsonl", tmp_path / "rows.csv"
        told = run(*asked, "--log", str(place))
        monkeypatch.setattr(lab.Bench, "_measure", None)
        first = json.loads(run(*asked, "--log", str(place), "--json"))
        runner = CliRunner()
        asked_again = [str(place), "--csv", str(rows)]
        assert runner.invoke(report, asked_again).stdout == told
        assert json.loads(runner.invoke(report, [str(place), "--json"]).stdout) == first
        assert len(rows.read_text().splitlines()) == 1 + 6

    def test_interrupted(self, asked, tmp_path, monkeypatch):
        place = tmp_path / "bench.jsonl"
        real = lab.Bench._measure
        done = []

        def stopped(self, group, turn):
            if len(done) == 4:
                raise KeyboardInterrupt
            done.extend(group)
            return real(self, group, turn)

        monkeypatch.setattr(lab.Bench, "_measure", stopped)
        shown = run(*asked, "--log", str(place), code=130)
        assert "Not finished: 4 of 6 generations." in shown
        assert "tokens/s" in shown
        assert len(list(Log(place).records())) == 4
        monkeypatch.setattr(lab.Bench, "_measure", real)
        assert json.loads(run(*asked, "--log", str(place), "--json"))["finished"] == 6


def test_interrupted_by_the_keyboard(prompts, tmp_path):
    """In a process of its own, with the signal that Ctrl-C sends."""
    place = tmp_path / "bench.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider.cli.main", "bench", *TOY, "--prompts", prompts,
         "-d", "ngram", "-n", "40", "--repeats", "100000", "--log", str(place)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts background jobs with the signal ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.monotonic() + HANGS_S
    while time.monotonic() < deadline and not (
        place.exists() and place.read_text().count("\n") > 10
    ):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=HANGS_S)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "Not finished: " in out
    assert "tokens/s" in out
    assert len(list(Log(place).records())) >= 8


def test_the_page(asked, tmp_path):
    pytest.importorskip("jinja2")
    place = tmp_path / "page.html"
    run(*asked, "--html", str(place))
    page = place.read_text()
    assert page.lstrip().startswith("<!")
    assert "ngram" in page


def test_adapters_are_targets_of_their_own(tmp_path):
    base = save(new_module("llama"), tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter")
    words = tmp_path / "words.txt"
    words.write_text("w5 w6 w5\nw7 w8 w7 w8\n")
    found = json.loads(
        run("-t", str(base), "--runtime", "hf", "--dtype", "float32", "--prompts", str(words),
            "-d", "ngram", "-n", "6", "--adapter", "none", "--adapter", str(adapter), "--json")
    )  # fmt: skip
    assert [(r["adapter"], r["configuration"]) for r in found["rows"]] == [
        ("", "plain"), ("", "ngram"), (str(adapter), "plain"), (str(adapter), "ngram"),
    ]  # fmt: skip
    targets = found["conditions"]["targets"]
    assert set(targets) == {"bare", str(adapter)}
    prints = [targets[name]["fingerprint"]["adapter"] for name in ("bare", str(adapter))]
    assert prints[0] == ""
    assert prints[1]
    assert all(r["memory"]["weights_bytes"] > 0 for r in found["rows"])
    assert all(r["memory"]["cache_bytes"] > 0 for r in found["rows"])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-d", "ngrm"], 2, ["ngrm", "Did you mean 'ngram'"]),
        (["--config", "drafter=ngram,rul=block"], 2, ["'rul'", "Did you mean 'rule'"]),
        (["--config", "ngram", "--config", "ngram"], 2, ["ngram", "label=NAME"]),
        (["--rule", "greedy", "--temperature", "0.7"], 2, ["greedy", "temperature 0"]),
        (["--temperature", "-1"], 2, ["temperature", "-1"]),
        (["--temperature", "0", "--temperature", "0"], 2, ["temperature", "twice"]),
        (["--batch", "0"], 2, ["one sequence or more", "0", "--batch 4"]),
        (["-n", "0"], 2, ["max_tokens"]),
        (["--limit", "0"], 2, ["limit", "0"]),
        (["--prompts", "nowhere.jsonl"], 2, ["nowhere.jsonl"]),
        (["--csv", "no/such/folder/x.csv"], 2, ["folder", "no/such/folder"]),
        (["--csv", ""], 2, ["is a folder"]),
        (["--csv", "/tmp"], 2, ["is a folder", "/tmp"]),
        (["--html", "/tmp"], 2, ["is a folder", "/tmp"]),
        (["--batch", "99999999"], 2, ["at most 256", "99999999"]),
        (["--adapter", "a", "--adapter", "a"], 2, ["adapter", "twice"]),
        (["--adapter", "none", "--adapter", "no/adapter"], 1, ["no/adapter"]),
        (["--repeats", "0"], 2, ["--repeats"]),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else str(v),
)
def test_mistakes_are_told_plainly(arguments, code, words, prompts, capsys):
    with pytest.raises(SystemExit) as left:
        main(["bench", *TOY, "--prompts", prompts, "-n", "4", *arguments])
    shown = capsys.readouterr()
    assert left.value.code == code, shown.err
    assert shown.out == ""
    assert "Traceback" not in shown.err
    for word in words:
        assert word in shown.err


def test_the_command_is_told(asked, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["outrider", "bench", "--target", "toy x"])
    found = json.loads(run(*asked, "--json"))
    assert found["conditions"]["command"] == "outrider bench --target 'toy x'"
    assert Path(found["conditions"]["prompts"]).name == "prompts.jsonl"


class TestDocs:
    """What docs/bench.md prints."""

    text = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()

    @pytest.mark.parametrize("line", re.findall(r"^outrider bench.*$", text, re.MULTILINE))
    def test_command_lines_name_what_there_is(self, line):
        words = shlex.split(line, comments=True)[2:]
        known = {option for p in typer.main.get_command(app).params for option in p.opts}
        assert {word for word in words if word.startswith("-")} <= known

    def test_every_metric_is_named(self):
        table = self.text.partition("## Metrics")[2]
        assert all(f"`{name}`" in table for name in METRICS)

    def test_the_python_runs(self, capsys, prompts):
        (snippet,) = re.findall(r"```python\n(.*?)```", self.text, re.DOTALL)
        snippet = snippet.replace("smollm2-135m", TOY[1]).replace('"bundled"', repr(prompts))
        exec(compile(snippet.replace("eagle", "ngram"), "bench.md", "exec"), {})
        assert "ngram,draft-length=4 Spread(n=3" in capsys.readouterr().out

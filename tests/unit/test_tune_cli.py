"""``outrider tune`` as a user meets it, on a small model with files of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider import Engine
from outrider.cli.tune import app
from outrider.errors import UsageError
from tests.small_models import new_module, save

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    return str(save(new_module("llama"), tmp_path / "model"))


@pytest.fixture
def asked(model, tmp_path) -> list[str]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"w{i} w{i + 1} w{i}\n" for i in range(8)))
    how = ["--target", model, "--prompts", str(prompts), "-n", "6", "--runtime", "native"]
    return [*how, "-d", "ngram", "-d", "suffix", "-k", "2", "-k", "4"]


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


def test_what_is_chosen_is_kept_told_used_and_forgotten(asked, model):
    told = json.loads(run(*asked, "--json"))
    assert [len(r["standings"]) for r in told["rounds"]] == [4, 1]
    assert told["rounds"][-1]["seen"] == 6  # --limit is six of each kind
    assert not told["certain"]  # three to choose by, three to judge by
    choice = told["choice"]
    assert (choice["drafter"] == "none") == (not told["certain"])

    kept = json.loads(run("--show", "--target", model, "--json"))
    assert kept["greedy"] == choice
    assert kept["sampled"] is None
    assert kept["about"]["greedy"]["max_tokens"] == 6

    out = Engine.load(model).generate([1, 2, 1, 2, 1], max_tokens=4)
    assert out.drafter == choice["drafter"]

    hot = json.loads(run(*asked, "--temperature", "1", "--json"))
    kept = json.loads(run("--show", "--target", model, "--json"))
    assert (kept["greedy"], kept["sampled"]) == (choice, hot["choice"])

    words = run("--show", "--target", model)
    assert "temperature 0:" in words
    assert run("--forget", "--target", model) == "Deleted.\n"
    assert run("--forget", "--target", model) == "There was none.\n"
    assert "no profile" in run("--show", "--target", model)


def test_a_dry_run_keeps_nothing(asked, model):
    words = run(*asked, "--dry-run")
    assert "plain decoding" in words
    assert "Kept in" not in words
    assert "no profile" in run("--show", "--target", model)


def test_no_time_at_all(asked):
    told = json.loads(run(*asked, "--minutes", "0", "--json"))
    assert told["stopped"]
    assert len(told["rounds"]) == 1


def test_a_broken_profile_is_replaced(asked, model, tmp_path):
    run(*asked)
    (path,) = (tmp_path / "cache" / "profiles").glob("*.json")
    path.write_text("{broken")
    run(*asked)
    assert json.loads(path.read_text())["greedy"]["drafter"] == "none"


def test_where_nothing_can_be_kept_nothing_is_searched(asked, tmp_path, monkeypatch):
    run(*asked, "--dry-run")  # the model is packed
    folder = tmp_path / "cache" / "profiles"
    folder.write_text("in the way")
    monkeypatch.setattr("outrider.lab.tune.tune", lambda *a, **k: pytest.fail("searched"))
    with pytest.raises(UsageError, match="--dry-run"):
        run(*asked)


def test_files_of_a_drafter_are_kept_by_their_whole_paths(model, monkeypatch):
    from outrider.cli.tune import _absolute

    monkeypatch.chdir(Path(model).parent)
    assert _absolute("model:model#tree=4") == f"model:{Path(model).resolve()}#tree=4"
    assert _absolute("suffix:match=3+eagle") == "suffix:match=3+eagle"
    assert _absolute("ngram") == "ngram"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-tokens", "0", "-d", "ngram"], "max_tokens"),
        (["--top-p", "0", "-d", "ngram"], "top_p"),
        (["--show", "--forget"], "two things"),
        (["--target", "toy:vocab=4", "-d", "ngram"], "no profile can be kept"),
        (["-d", "ngrma"], "ngram"),
        (["-d", "ngram", "-r", "greedy", "--temperature", "1"], "temperature 0"),
        (["-d", "ngram", "-k", "many"], "draft length"),
        (["--prompts", "nowhere.txt"], r"nowhere\.txt"),
    ],
)
def test_bad_input_is_told_before_anything_is_timed(arguments, words, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match=words):
        run(*arguments)

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli import models as command
from outrider.cli.models import app
from outrider.errors import ChecksumError, ModelNotFoundError, UnknownNameError
from outrider.models import memory
from outrider.models.catalogue import CATALOGUE, Entry, path_of
from tests.unit.test_memory import PARAMETERS, V, write_gguf

NAME = "tiny-model"


@dataclass(frozen=True)
class FakeSource:
    data: bytes

    def open(self, folder: Path) -> io.BufferedIOBase:
        return io.BytesIO(self.data)


@pytest.fixture(autouse=True)
def entry(tmp_path, monkeypatch) -> Entry:
    """The catalogue holds one model, whose source is a real, tiny GGUF file."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")  # no wrapping: paths are looked for in the output
    written = write_gguf(tmp_path / "source.gguf").path
    assert written is not None
    data = written.read_bytes()
    tiny = Entry(
        name=NAME,
        description="a model for tests",
        filename="tiny.gguf",
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        parameters=PARAMETERS,
        licence="MIT",
        sources=(FakeSource(data),),
    )
    for name in list(CATALOGUE):
        monkeypatch.delitem(CATALOGUE, name)
    monkeypatch.setitem(CATALOGUE, NAME, tiny)
    return tiny


def run(*arguments: str) -> str:
    """Standard output of a command that must succeed."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


class TestList:
    def test_table(self):
        text = run("list")
        for words in (NAME, "MIT", "a model for tests", "no"):
            assert words in text
        run("pull", NAME)
        assert "yes" in run("list")

    def test_json(self, entry):
        (row,) = json.loads(run("list", "--json"))
        assert row == {
            "name": NAME,
            "description": "a model for tests",
            "parameters": entry.parameters,
            "size_bytes": entry.size_bytes,
            "sha256": entry.sha256,
            "licence": "MIT",
            "pulled": False,
            "path": str(path_of(entry)),
        }
        run("pull", NAME)
        assert json.loads(run("list", "--json"))[0]["pulled"] is True

    def test_help_says_what_json_is(self):
        assert isinstance(json.loads(run("list", "--json")), list)
        assert "one JSON array" in run("list", "--help")


class TestPull:
    def test_prints_the_path_alone(self, entry):
        assert run("pull", NAME) == f"{path_of(entry)}\n"
        assert path_of(entry).stat().st_size == entry.size_bytes

    def test_json(self, entry):
        assert json.loads(run("pull", NAME, "--json")) == {
            "name": NAME,
            "path": str(path_of(entry)),
        }

    def test_verify_reads_the_file(self, entry):
        run("pull", NAME)
        path_of(entry).write_bytes(b"\xff" * entry.size_bytes)
        run("pull", NAME)
        with pytest.raises(ChecksumError):
            run("pull", NAME, "--verify")

    def test_errors_are_left_to_main(self):
        with pytest.raises(UnknownNameError, match=f"Did you mean '{NAME}'"):
            run("pull", "tiny-modle")


class TestRemove:
    def test_text(self, entry):
        run("pull", NAME)
        assert run("remove", NAME) == f"{NAME} was removed\n"
        assert not path_of(entry).exists()
        assert run("remove", NAME) == f"{NAME} was not here\n"

    def test_json(self):
        run("pull", NAME)
        assert json.loads(run("remove", NAME, "--json")) == {"name": NAME, "removed": True}
        assert json.loads(run("remove", NAME, "--json"))["removed"] is False


class TestInfo:
    def test_json(self, entry, monkeypatch):
        monkeypatch.setattr(memory, "available_bytes", lambda: 5 * 10**9)
        found = json.loads(run("info", NAME, "--no-numbers", "--dtype", "float32", "--json"))
        expected = {
            "target": NAME,
            "kind": "gguf",
            "path": str(path_of(entry)),
            "runtime": "native",
            "architecture": "llama",
            "parameters": entry.parameters,
            "precision": "Q4_1",
            "layers": 2,
            "vocab_size": V,
            "context_length": 256,
            "dtype": "float32",
            "weights_bytes": 4 * entry.parameters,
            "cache_bytes_per_token": 2 * 2 * 1 * 16 * 4,
            "available_bytes": 5 * 10**9,
        }
        assert found.items() >= expected.items()
        assert found["runtime_reason"]

    def test_table_has_units(self, entry):
        text = run("info", NAME, "--no-numbers", "--dtype", "bfloat16")
        assert str(path_of(entry)) in text
        assert f"{entry.parameters:,}" in text
        assert f"{2 * entry.parameters / 1e6:.3g} MB" in text
        assert "context length" in text

    def test_model_that_is_not_here_is_fetched_with_a_bar(self, entry, monkeypatch):
        fetched = []
        with_bar = command.pull_with_bar

        def pull(name: str) -> None:
            fetched.append(name)
            with_bar(name)

        monkeypatch.setattr(command, "pull_with_bar", pull)
        for _ in "ab":
            run("info", NAME, "--no-numbers")
        assert fetched == [NAME]
        assert path_of(entry).is_file()

    def test_long_path_is_never_cut(self, entry, monkeypatch):
        monkeypatch.setenv("COLUMNS", "40")
        text = run("info", NAME, "--no-numbers")
        assert str(path_of(entry)) in "".join(text.split())

    def test_toy_is_measured(self):
        found = json.loads(run("info", "toy", "--json"))
        assert (found["kind"], found["runtime"]) == ("toy", "toy")
        assert found["same_numbers_in_any_block"] is True
        assert found["largest_logit_difference"] == 0

    def test_help_says_what_is_measured(self):
        text = " ".join(run("info", "--help").replace("│", " ").split())
        assert "whether a position's numbers are the same in any block" in text

    def test_unknown_target(self):
        with pytest.raises(ModelNotFoundError, match=f"Did you mean '{NAME}'"):
            run("info", "tiny-modle", "--no-numbers")

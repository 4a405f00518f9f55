from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.drafts import app
from outrider.cli.generate import app as generate
from outrider.engine.matching import DraftMismatchWarning
from outrider.errors import DraftMismatchError, ModelFileError, ModelNotFoundError
from outrider.models import drafts
from outrider.models.drafts import describe, find_heads
from outrider.registry import DRAFTERS
from tests.small_models import new_module, save
from tests.unit.test_adapter import write_adapter
from tests.unit.test_fingerprint import make_head, of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("OUTRIDER_DRAFTS", raising=False)
    monkeypatch.setattr(drafts, "_SHIPPED", tmp_path / "shipped")
    return tmp_path / "cache"


@pytest.fixture
def base(tmp_path) -> Path:
    return save(new_module("llama"), tmp_path / "base")


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


class TestList:
    def test_all_three_places(self, tmp_path, monkeypatch, cache):
        make_head(tmp_path / "shipped" / "some-model")
        make_head(cache / "drafts" / "mine")
        make_head(tmp_path / "work" / "one")
        make_head(tmp_path / "two")
        places = f"{tmp_path / 'work'}:{tmp_path / 'two'}:{tmp_path / 'nowhere'}"
        monkeypatch.setenv("OUTRIDER_DRAFTS", places)
        found = json.loads(run("list", "--json"))["heads"]
        assert [(row["origin"], row["name"], row["kind"]) for row in found] == [
            ("shipped", "some-model", "eagle"),
            ("cache", "mine", "eagle"),
            ("OUTRIDER_DRAFTS", "one", "eagle"),
            ("OUTRIDER_DRAFTS", "two", "eagle"),
        ]
        text = run("list")
        assert str(cache / "drafts" / "mine") in text
        assert "eagle" in text

    def test_a_broken_head_does_not_hide_the_others(self, cache):
        make_head(cache / "drafts" / "a")
        (make_head(cache / "drafts" / "b") / "model.safetensors").unlink()
        one, other = json.loads(run("list", "--json"))["heads"]
        assert "problem" not in one
        assert "no weights beside it" in other["problem"]
        assert "unreadable" in run("list")

    def test_drafters(self):
        found = json.loads(run("list", "--json"))
        assert found["heads"] == []
        assert {row["name"] for row in found["drafters"]} == set(DRAFTERS)
        assert all(row["description"] for row in found["drafters"])
        text = run("list")
        assert "no draft heads here" in text
        assert "crosstoken" in text

    def test_where_the_package_keeps_its_own(self, monkeypatch):
        monkeypatch.undo()
        assert drafts._SHIPPED.parent.name == "heads"
        assert all(origin != "shipped" or folder.is_dir() for origin, folder in find_heads())


class TestInfo:
    def test_json(self, tmp_path, base):
        head = make_head(tmp_path / "head", of(base), training={"steps": 7})
        found = json.loads(run("info", str(head), "--json"))
        assert found["kind"] == "eagle"
        assert found["taps"] == [0, 1]
        assert found["draft_vocab"] == 48
        assert found["target"] == of(base).to_dict()
        assert found["about"] == {"training": {"steps": 7}}
        assert found["file_bytes"] == sum(f.stat().st_size for f in head.iterdir())
        # fc, q, k, v, o, the three of the mlp, the output matrix, four norms
        d, wide = 32, 48
        assert found[
            "parameters"
        ] == 2 * d * d + 3 * 2 * d * d + d * d + 3 * d * wide + wide * d + (4 * d)

    def test_text(self, tmp_path, base):
        head = make_head(tmp_path / "head", of(base), training={"steps": 7})
        text = run("info", str(head))
        for words in ("eagle", "0, 1", "int8", of(base).weights, "MB"):
            assert words in text
        assert re.search(r"^    steps +7 *$", text, re.MULTILINE)
        assert not set("{}[]") & set(text)
        make_head(head)
        assert "it does not say" in run("info", str(head))

    def test_the_head_that_comes_along_by_its_name(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        found = json.loads(run("info", "eagle", "--json"))
        assert Path(found["folder"]).parts[-2:] == ("shipped", "smollm2-135m")
        assert json.loads(run("info", "shipped", "--json")) == found
        make_head(tmp_path / "eagle")  # a folder of the name is what is meant
        assert json.loads(run("info", "eagle", "--json"))["folder"] == "eagle"
        with pytest.raises(ModelNotFoundError, match="No draft head comes with 'toy'"):
            run("check", "shipped", "--target", "toy")

    def test_a_head_in_the_layout_of_another_project(self, tmp_path):
        head = make_head(tmp_path / "head")
        config = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 32}
        (head / "config.json").write_text(json.dumps(config))
        found = json.loads(run("info", str(head), "--json"))
        assert (found["kind"], found["hidden_size"], found["target"]) == ("eagle", 32, None)

    def test_what_is_no_head(self, tmp_path):
        with pytest.raises(ModelNotFoundError, match="no draft head"):
            describe(tmp_path / "nowhere")
        with pytest.raises(ModelFileError, match=r"config\.json' cannot be read .*No such file"):
            describe(tmp_path)
        for text, reason in (
            ("{}", "its format is None"),
            ("[]", "it holds no object"),
            ("{", "Expecting"),
            ('{"format": "outrider-eagle-1"}', "it lacks 'head'"),
            ('{"format": "outrider-eagle-1", "head": {}}', "no weights beside it"),
        ):
            (tmp_path / "config.json").write_text(text)
            with pytest.raises(ModelFileError, match=reason):
                describe(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"none")
        with pytest.raises(ModelFileError, match=r"model\.safetensors' cannot be read"):
            describe(tmp_path)


class TestCheck:
    def test_a_match(self, tmp_path, base):
        head = make_head(tmp_path / "head", of(base))
        found = json.loads(run("check", str(head), "--target", str(base), "--json"))
        assert found["matches"] is True
        assert all(part["same"] for part in found["parts"].values())
        assert found["tokens_per_target_call"] >= 1
        assert 0 <= found["acceptance_rate"] <= 1
        text = run("check", str(head), "--target", str(base))
        assert "The draft matches." in text
        assert "tokens per target call" in text

    def test_a_mismatch(self, tmp_path, base, recwarn):
        head = make_head(tmp_path / "head", replace(of(base), weights="1"))
        arguments = ["check", str(head), "--target", str(base)]
        found = json.loads(run(*arguments, "--json", code=1))
        assert found["matches"] is False
        assert [name for name, part in found["parts"].items() if not part["same"]] == ["weights"]
        assert found["tokens_per_target_call"] >= 1
        text = run(*arguments, code=1)
        assert "differs" in text
        assert "does not match" in text
        # What it prints need not be told a second time.
        assert not [one for one in recwarn if one.category is DraftMismatchWarning]

    def test_with_an_adapter(self, tmp_path, base):
        adapter = write_adapter(tmp_path / "adapter")
        head = make_head(tmp_path / "head", of(base, adapter=adapter))
        arguments = ["check", str(head), "--target", str(base)]
        run(*arguments, "--adapter", str(adapter))
        run(*arguments, code=1)

    def test_a_head_that_does_not_say(self, tmp_path, base):
        head = make_head(tmp_path / "head")
        arguments = ["check", str(head), "--target", str(base)]
        found = json.loads(run(*arguments, "--json", code=1))
        assert found["parts"]["weights"] == {
            "head": None, "target": of(base).weights, "same": False
        }  # fmt: skip
        assert "unknown" in run(*arguments, code=1)

    def test_other_sizes_are_an_error(self, tmp_path):
        other = save(new_module("llama", hidden_size=16), tmp_path / "other")
        head = make_head(tmp_path / "head")
        with pytest.raises(ModelFileError, match="made for another target"):
            run("check", str(head), "--target", str(other))


def test_strict_on_the_command_line(tmp_path, base):
    head = make_head(tmp_path / "head", replace(of(base), weights="1"))
    arguments = ["w5", "--target", str(base), "--drafter", f"eagle:{head}", "--json", "--raw"]
    with pytest.raises(DraftMismatchError):
        CliRunner().invoke(generate, [*arguments, "--strict"], catch_exceptions=False)
    with pytest.warns(DraftMismatchWarning):
        done = CliRunner().invoke(generate, arguments, catch_exceptions=False)
    assert json.loads(done.stdout)["drafter"] == "eagle"


def test_main_knows_the_command():
    from typer.main import get_command

    from outrider.cli.main import app as root

    command = get_command(root).get_command(None, "drafts")
    assert {"list", "info", "check"} <= set(command.list_commands(None))

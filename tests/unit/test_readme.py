"""What README.md prints runs: its Python on a small model, its command lines as far as parsing."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from outrider.cli.main import app
from outrider.models.catalogue import CATALOGUE
from tests.small_models import new_module
from tests.tokenizers_for_tests import new_byte_level

TEXT = (Path(__file__).parents[2] / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = re.findall(r"^outrider .*$", TEXT, re.MULTILINE) + re.findall(
    r"`(outrider [^`]+)`", TEXT
)
DOWNLOADED = ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A small model in place of those that the README fetches."""
    tokenizer = new_byte_level()
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    new_module("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda code: code.partition("\n")[0])
def test_python_runs_from_top_to_bottom(snippet, folder, capsys):
    for name in DOWNLOADED:
        snippet = snippet.replace(f'"{name}"', repr(str(folder)))
    exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out


def leaves(line: str) -> list[list[str]]:
    """A line's words; ``a | b`` in it stands for either."""
    first, *others = [shlex.split(part, comments=True) for part in line.split("|")]
    return [first[1:], *([*first[1:-1], *other] for other in others)]


@pytest.mark.parametrize("line", COMMANDS)
def test_command_lines_name_what_there_is(line):
    for words in leaves(line):
        command = typer.main.get_command(app)
        while words and hasattr(command, "get_command"):
            name = words.pop(0)
            command = command.get_command(None, name)
            assert command is not None, name
        known = {o for param in command.params for o in (*param.opts, *param.secondary_opts)}
        assert {word for word in words if word.startswith("-")} <= known | {"--help"}


def test_there_is_something_to_check():
    assert len(SNIPPETS) == 2
    assert len(COMMANDS) >= 5


def test_every_command_but_two_has_json():
    """As the README says."""

    def walk(command, path):
        if not hasattr(command, "list_commands"):
            yield path, {option for param in command.params for option in param.opts}
            return
        for name in command.list_commands(None):
            yield from walk(command.get_command(None, name), (*path, name))

    found = dict(walk(typer.main.get_command(app), ()))
    assert {path for path, options in found.items() if "--json" not in options} == {
        ("chat",), ("demo",)
    }  # fmt: skip


@pytest.mark.model
def test_the_default_models_sizes(smollm):
    entry = CATALOGUE["smollm2-135m"]
    assert f"has {entry.size_bytes / 1e6:.1f} MB" in TEXT
    assert f"weights {smollm.model.weights.streamed_bytes / 1e6:.0f} MB" in TEXT

"""What is told about running a server: its commands and options are those that there are."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from outrider.cli import serve
from outrider.serve.metrics import Metrics

ROOT = Path(__file__).parents[2]
SERVICE = (ROOT / "deploy" / "outrider.service").read_text()
CONTAINER = (ROOT / "deploy" / "Containerfile").read_text()
DOCS = [ROOT / "docs" / name for name in ("running.md", "serve.md")]


def parsed(arguments: list[str]) -> dict[str, object]:
    """The command's parameters; fails for an option that there is not."""
    return get_command(serve.app).make_context("serve", arguments).params


def one(pattern: str, text: str) -> str:
    (found,) = re.findall(pattern, text, re.MULTILINE)
    return str(found)


def commands(text: str) -> list[list[str]]:
    """All commands that start a server, without continued lines and what comes before them."""
    blocks = re.split(r"^```.*$", text, flags=re.MULTILINE)[1::2]
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    return [
        shlex.split(found[1]) for line in lines if (found := re.search(r"outrider serve(.*)", line))
    ]


def test_the_service_starts_what_there_is_and_waits_for_its_end():
    command = shlex.split(one(r"^ExecStart=(.*)$", SERVICE))
    assert command[:2] == ["/opt/outrider/bin/outrider", "serve"]
    options = parsed(command[2:])
    assert options["host"] == "127.0.0.1"
    assert float(one(r"^TimeoutStopSec=(\d+)$", SERVICE)) >= options["drain"] + 10
    assert one(r"^KillSignal=(.*)$", SERVICE) == "SIGTERM"
    # Programs are compiled at run time.
    assert not re.search(r"^MemoryDenyWriteExecute", SERVICE, re.MULTILINE)


def test_the_container_starts_what_there_is():
    entry = json.loads(one(r"^ENTRYPOINT (\[.*\])$", CONTAINER))
    name, *arguments = json.loads(one(r"^CMD (\[\"serve.*\])$", CONTAINER))
    assert (entry, name) == (["outrider"], "serve")
    options = parsed(arguments)
    assert one(r"^EXPOSE (\d+)$", CONTAINER) == str(options["port"])
    assert f"127.0.0.1:{options['port']}/ready" in CONTAINER
    assert one(r"^USER (.*)$", CONTAINER) != "root"
    assert "API_KEY=" not in CONTAINER
    assert "torch==" in (ROOT / "requirements" / "lock.txt").read_text()
    for source in re.findall(r"^COPY (.*) \S+$", CONTAINER, re.MULTILINE):
        assert all((ROOT / path).exists() for path in source.split()), source


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_the_docs_commands_can_be_given(path):
    found = commands(path.read_text())
    assert found
    for arguments in found:
        parsed(arguments)


def test_the_docs_queries_are_of_counters_that_there_are():
    metrics = Metrics("m")
    metrics.watch("running", "", lambda: 0)
    metrics.watch("waiting", "", lambda: 0)
    told = metrics.text()
    asked = set(re.findall(r"(?:outrider_|vllm:)\w+", DOCS[0].read_text()))
    asked -= {"vllm:spec_decode_"}  # of the panels
    assert len(asked) > 8
    for name in asked:
        stem = name.removesuffix("_total").removesuffix("_bucket")
        assert f"# TYPE {stem}" in told, name

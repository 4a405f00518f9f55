"""The command line as a user meets it: a process of its own, its streams and its exit code."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from outrider.cli.main import main
from tests.patience import HANGS_S
from tests.small_models import new_module, new_tokenizer, save

OUTRIDER = [sys.executable, "-m", "outrider.cli.main"]
TOY = ["--target", "toy:vocab=5,seed=3"]
PLAIN_ENV = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}


def run(*arguments, text="", env=None):
    return subprocess.run(
        [*OUTRIDER, *arguments],
        input=text,
        capture_output=True,
        text=True,
        env=PLAIN_ENV | (env or {}),
        timeout=HANGS_S,
    )


def run_in_terminal(*arguments, env=None):
    """Standard output and error on one pseudo-terminal; returns what it shows."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*OUTRIDER, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=PLAIN_ENV | {"TERM": "xterm-256color", "COLUMNS": "120"} | (env or {}),
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            block = os.read(master, 4096)
        except OSError:
            break
        if not block:
            break
        shown += block
    process.wait(timeout=HANGS_S)
    os.close(master)
    return process.returncode, shown.decode()


def test_json_has_every_promised_name():
    done = run("generate", "abab", *TOY, "--max-tokens", "20", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result = json.loads(done.stdout)
    names = {"text", "token_ids", "finish_reason", "target", "drafter", "rule", "trace"}
    assert names <= set(result)
    trace = {
        "drafted_tokens", "accepted_tokens", "rejected_rounds", "target_calls", "emitted_tokens",
        "draft_time_ms", "verify_time_ms", "total_time_ms", "ttft_ms", "acceptance_rate",
        "tokens_per_target_call", "target_calls_per_token",
    }  # fmt: skip
    assert trace <= set(result["trace"])
    assert result["trace"]["emitted_tokens"] == len(result["token_ids"]) == 20
    assert len(result["text"]) == 20
    assert (result["finish_reason"], result["drafter"], result["rule"]) == (
        "length", "ngram", "greedy",
    )  # fmt: skip


def test_the_same_seed_gives_the_same_text_with_and_without_a_draft():
    request = ["generate", "abab", *TOY, "--temperature", "1", "--seed", "4", "--json", "-n", "40"]
    plain = json.loads(run(*request, "--plain").stdout)
    for drafter in ("ngram", "model:toy:vocab=5,seed=9", "script:1,2,3"):
        found = json.loads(run(*request, "--drafter", drafter, "-k", "3").stdout)
        assert found["token_ids"] == plain["token_ids"], drafter


def test_piped_output_is_the_text_and_nothing_else():
    done = run("generate", "abab", *TOY, "--max-tokens", "12")
    assert re.fullmatch(r"[a-e]{12}\n", done.stdout)
    assert "12 tokens" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_a_terminal_shows_origins_by_colour_and_a_legend():
    code, shown = run_in_terminal("generate", "abab", *TOY, "--max-tokens", "40")
    assert code == 0
    assert "drafted and kept" in shown
    assert "\x1b[32m" in shown  # green: an accepted token


def test_no_color_is_kept_to():
    code, shown = run_in_terminal("generate", "abab", *TOY, env={"NO_COLOR": "1"})
    assert code == 0
    assert "drafted and kept" not in shown
    assert not re.search(r"\x1b\[[\d;]*m", shown)
    for command in (["models", "list"], ["generate", "ab", *TOY, "--rule", "coupld"]):
        _, shown = run_in_terminal(*command, env={"NO_COLOR": "1"})
        assert not re.search(r"\x1b\[[\d;]*m", shown)


def test_compare_shows_both():
    done = run("generate", "abab", *TOY, "--compare", "--json", "-n", "16")
    result = json.loads(done.stdout)
    assert result["plain"]["token_ids"] == result["token_ids"]
    assert result["plain"]["trace"]["target_calls"] == 16
    assert result["speedup"] > 0
    shown = run("generate", "abab", *TOY, "--compare", "-n", "16")
    assert "plain" in shown.stderr
    assert "all 16 tokens are the same" in shown.stderr


def test_prompt_from_standard_input():
    given = run("generate", "abab", *TOY, "-n", "8").stdout
    assert run("generate", "-", *TOY, "-n", "8", text="abab\n").stdout == given


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["generate", "hi", "--target", "smolm2-135m"], 1, ["smolm2-135m", "smollm2-135m"]),
        (["generate", "hi", "--target", "./no/such.gguf"], 1, ["./no/such.gguf", "folder"]),
        (["generate", "ab", *TOY, "--drafter", "ngrm"], 2, ["ngrm", "Did you mean 'ngram'"]),
        (["generate", "ab", *TOY, "--rule", "coupld"], 2, ["coupld", "Did you mean 'coupled'"]),
        (["generate", "ab", *TOY, "--temperature", "-1"], 2, ["temperature", "-1"]),
        (["generate", "ab", *TOY, "--top-p", "0"], 2, ["top_p", "above 0"]),
        (["generate", "ab", *TOY, "--max-tokens", "0"], 2, ["max_tokens", "1"]),
        (["generate", "ab", *TOY, "--draft-length", "two"], 2, ["--draft-length", "two"]),
        (["generate", "ab", *TOY, "--draft-length", "-1"], 2, ["-1"]),
        (["generate", "ab", *TOY, "--logit-bias", "x"], 2, ["--logit-bias", "42:-1.5"]),
        (["generate", "ab", *TOY, "--logit-bias", "99:1"], 2, ["99", "5 tokens"]),
        (["generate", "ab", *TOY, "--rule", "greedy", "--temperature", "1"], 2, ["greedy", "0"]),
        (["generate", "ab", *TOY, "--stop", ""], 2, ["stop string"]),
        (["generate", "", *TOY], 2, ["empty"]),
        (["generate", "xyz", *TOY], 2, ["'x'"]),
        (["generate", "abab", "--target", "toy:context=3"], 2, ["4 tokens", "3", "Shorten"]),
        (
            ["generate", "ab", *TOY, "--drafter", "model:toy:vocab=9"],
            1,
            ["tokenizer", "crosstoken"],
        ),
        (["generate", "ab", *TOY, "--drafter", "model"], 2, ["draft model", "model:"]),
        (["generate", "ab", *TOY, "--dtype", "int3"], 2, ["int3", "float32"]),
        (["generate", "ab", *TOY, "--drafter", "auto:1"], 2, ["'auto' takes no argument"]),
        (["generate", "ab", *TOY, "--device", "meta"], 2, ["device 'meta'", "cpu"]),
        (["generate", "ab", *TOY, "--device", "cuda:99"], 2, ["device 'cuda:99'"]),
        (["generate", "ab", "-t", "smolm", "--device", "cpuu"], 2, ["device 'cpuu'"]),
        (["generate", "ab", *TOY, "--logit-bias", "1:1e39"], 2, ["logit_bias", "1e+39"]),
        (["chat", *TOY, "--rule", "greedy", "--temperature", "1"], 2, ["temperature 0"]),
        (["chat", *TOY], 2, ["no chat template", "outrider generate"]),
        (["demo", "-t", "smolm", "-n", "0"], 2, ["max_tokens"]),
        (["models", "pull", "nothing"], 2, ["nothing", "smollm2-135m"]),
        (["generate"], 2, ["prompt"]),
        (["nonsense"], 2, ["nonsense"]),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else str(v),
)
def test_mistakes_are_told_plainly(arguments, code, words, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)  # in this process: a new one would import torch each time
    shown = capsys.readouterr()
    assert left.value.code == code, shown.err
    assert shown.out == ""
    assert "Traceback" not in shown.err
    for word in words:
        assert word in shown.err


def test_a_broken_file_is_named(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\x00" * 40)
    done = run("generate", "hi", "--target", str(broken))
    assert done.returncode == 1
    assert "broken.gguf" in done.stderr.replace("\n", "")
    assert "Traceback" not in done.stderr


def test_interrupt_ends_cleanly():
    process = subprocess.Popen(
        [*OUTRIDER, "generate", "abab", "--target", "toy:context=9000000", "-n", "9000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell starts background jobs with the signal ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    ready, _, _ = select.select([process.stdout], [], [], 60)
    assert ready
    assert process.stdout.read(64)  # it is at work
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=HANGS_S)
    assert process.returncode in (1, 130)
    assert b"Traceback" not in errors


def test_a_closed_pipe_ends_quietly():
    command = " ".join(
        [*OUTRIDER, "generate", "abab", "--target", "toy:context=99999", "-n", "9999"]
    )
    done = subprocess.run(
        f"{command} | head -c 5", shell=True, capture_output=True, text=True, timeout=HANGS_S
    )
    assert len(done.stdout) == 5
    assert "Traceback" not in done.stderr


@pytest.fixture
def chatty(tmp_path) -> str:
    """A small model with a chat template; its context holds some dozens of words."""
    folder = save(new_module("gpt2"), tmp_path / "chatty")
    words = new_tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    words.save_pretrained(folder)
    return str(folder)


def test_chat_keeps_going_after_a_mistake(chatty):
    text = f"{'w5 ' * 120}\n/reset\n/nonsense\nw5 w6\n/quit\n"
    done = run("chat", "-t", chatty, "-n", "4", text=text)
    assert done.returncode == 0
    assert "120 tokens" in done.stderr
    assert "forgotten" in done.stderr
    assert "w" in done.stdout


def test_output_that_cannot_be_written():
    """A full disk is told, also when it shows itself only as the program ends."""
    for command in (["generate", "abab", *TOY], ["models", "list", "--json"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [*OUTRIDER, *command], stdout=full, stderr=subprocess.PIPE, text=True, env=PLAIN_ENV
            )
        assert done.returncode == 1
        assert "error: The output could not be" in done.stderr
        assert "No space left" in done.stderr
        assert "Traceback" not in done.stderr
        assert "Exception ignored" not in done.stderr


def test_a_terminal_without_the_characters():
    """A toy's letters go on past ASCII; a question mark stands for what cannot be shown."""
    toy = ["--target", "toy:vocab=400,sharpness=0", "--temperature", "1", "--seed", "1"]
    done = run("generate", "abab", *toy, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "?" in done.stdout
    assert done.stdout.isascii()


@pytest.mark.parametrize("command", ["generate", "models"])
def test_a_cache_below_the_home_of_nobody(command, monkeypatch, capsys):
    monkeypatch.setenv("OUTRIDER_CACHE", "~nosuchuser/x")
    arguments = {"generate": ["generate", "hi"], "models": ["models", "list"]}[command]
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "OUTRIDER_CACHE" in capsys.readouterr().err


@pytest.mark.model
def test_chat_with_the_default_model():
    done = run("chat", "--max-tokens", "12", text="Say hello.\nAnd again.\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 5
    assert done.stderr.count("target call") == 2


def test_help_and_version():
    assert "generate" in run("--help").stdout
    assert run("--version").stdout.startswith("outrider ")
    for command in ("generate", "chat", "demo", "models"):
        assert run(command, "--help").returncode == 0


def test_models_list_and_info():
    rows = json.loads(run("models", "list", "--json").stdout)
    assert {"name", "sha256", "size_bytes", "pulled"} <= set(rows[0])
    info = json.loads(run("models", "info", "toy", "--json").stdout)
    assert info["runtime"] == "toy"
    assert info["same_numbers_in_any_block"] is True

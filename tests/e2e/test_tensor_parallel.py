"""One target in two processes, beside the same in one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import Engine
from outrider.cli.main import main
from outrider.engine.loading import draft_device, parse_device, runtime_for
from outrider.errors import UsageError
from outrider.models.locate import locate
from outrider.models.torchrun import check_started, follows
from tests.e2e.spread_target import run
from tests.patience import HANGS_S
from tests.small_models import new_module, randomise, save

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
QUIET = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def folder_of(family: str, place: Path, seed: int = 0, **changes: Any) -> str:
    return str(save(randomise(new_module(family, seed, **changes)), place))


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*TORCHRUN, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=QUIET, timeout=HANGS_S)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_two_processes_say_what_one_does(family, tmp_path):
    """Greedy and coupled, with drafters of every kind, and the caches of a conversation.

    Sums over two processes come in another order than in one, so logits agree to rounding; the
    models are made so that no two tokens are as near as that.
    """
    folder, draft = folder_of(family, tmp_path / "target"), folder_of(family, tmp_path / "draft", 1)
    done = torchrun("-m", "tests.e2e.spread_target", folder, draft, "tp")
    assert done.returncode == 0, done.stderr
    spread = json.loads(done.stdout)  # one process prints
    alone = run(folder, draft, "cpu")
    assert (spread.pop("model"), alone.pop("model")) == ("Lead", "HFModel")
    assert spread.pop("heads") == [n // 2 for n in alone.pop("heads")]
    logits = torch.tensor(spread.pop("logits")), torch.tensor(alone.pop("logits"))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    # Two addends have one sum in either order, so the numbers are the same in any company too.
    assert spread.pop("same bits") == alone.pop("same bits") == (family != "mistral")
    assert max(spread.pop("worst"), alone.pop("worst")) < (1e-3 if family == "mistral" else 1e-30)
    assert spread == alone
    drafted = {name: n for name, (_, n, _) in spread.items() if n}
    assert len(drafted) >= (4 if family == "mistral" else 6)


@pytest.mark.slow
def test_the_command_line_prints_once_and_ends(tmp_path):
    folder = folder_of("llama", tmp_path / "target")
    options = ["generate", "w5 w6 w7 w5 w6", "--target", folder, "--drafter", "ngram", "--dtype"]
    options += ["float32", "--seed", "1", "--temperature", "1", "-n", "12", "--json"]
    done = torchrun("-m", "outrider.cli.main", *options, "--device", "tp")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    alone = subprocess.run(
        [sys.executable, "-m", "outrider.cli.main", *options, "--runtime", "hf"],
        capture_output=True, text=True, env=QUIET, timeout=HANGS_S,
    )  # fmt: skip
    assert told["token_ids"] == json.loads(alone.stdout)["token_ids"]


@pytest.mark.slow
def test_an_audit_over_two_processes_is_consistent(tmp_path):
    folder, draft = (folder_of("qwen2", tmp_path / str(seed), seed) for seed in (0, 1))
    done = torchrun(
        "-m", "outrider.cli.main", "audit", "--target", folder, "--drafter", f"model:{draft}",
        "--dtype", "float32", "--device", "tp", "--samples", "40", "--prompt", "w5 w6 w7",
        "--json", "--seed", "1", "--draft-length", "2",  # by the clock it may draft nothing
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["verdict"] == "consistent"
    assert told["drafted_tokens"]


def complete(address: str, seed: int, tokens: int) -> str:
    body = {"model": "target", "prompt": "w5 w6 w7 w5 w6", "max_tokens": tokens, "seed": seed}
    body |= {"temperature": float(seed % 2), "ignore_eos": True}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=HANGS_S) as answer:
        return str(json.load(answer)["choices"][0]["text"])


@pytest.mark.slow
def test_a_server_over_two_processes_answers_as_one_does(tmp_path):
    """Several requests at once; told to end, it finishes those that it took, in both processes."""
    folder = folder_of("llama", tmp_path / "target")
    options = ["--target", folder, "--name", "target", "--dtype", "float32", "--port", "0"]
    command = [*TORCHRUN, "-m", "outrider.cli.main", "serve", *options, "--device", "tp"]
    engine = Engine.load(folder, runtime="hf", dtype="float32", drafter="none")
    alone = {
        seed: engine.generate(
            "w5 w6 w7 w5 w6", max_tokens=24, seed=seed, temperature=float(seed % 2),
            ignore_eos=True,
        ).text
        for seed in range(6)
    }  # fmt: skip
    with (
        subprocess.Popen(
            [*command, "--drafter", "ngram", "--drain", "20"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=QUIET,
        ) as server,
        ThreadPoolExecutor(6) as pool,
    ):  # fmt: skip
        try:
            assert server.stdout is not None
            told = server.stdout.readline()  # one process tells it, when requests are taken
            (address,) = re.findall(r"http://127\.0\.0\.1:\d+", told)
            answers = dict(enumerate(pool.map(lambda s: complete(address, s, 24), alone)))
            assert answers == alone
            last = [pool.submit(complete, address, seed, 200) for seed in range(2)]
            time.sleep(0.3)
            server.send_signal(signal.SIGTERM)
            assert all(one.result().startswith(alone[seed]) for seed, one in enumerate(last))
            assert server.wait(HANGS_S) is not None
        finally:
            server.kill()
    with pytest.raises(urllib.error.URLError):
        complete(address, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [("llama", {"num_key_value_heads": 1}, "1 key heads"), ("gpt2", {}, "no plan")],
)
def test_what_cannot_be_shared_out_is_refused(family, changes, told, tmp_path):
    folder = folder_of(family, tmp_path / "target", **changes)
    done = torchrun(
        "-m", "outrider.cli.main", "generate", "w5", "--target", folder, "--device", "tp"
    )
    assert done.returncode != 0
    assert told in done.stderr
    assert "Traceback (most recent call last)" not in done.stderr.partition("torch/distributed")[0]


class TestAlone:
    def test_a_process_by_itself_has_nothing_to_spread_over(self, monkeypatch):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        assert not follows("tp")
        with pytest.raises(UsageError, match="torchrun"):
            check_started()
        with pytest.raises(UsageError, match="torchrun"):
            parse_device("tp")

    def test_the_command_line_says_how_to_start_it(self, monkeypatch, capsys):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        with pytest.raises(SystemExit) as end:
            main(["generate", "a", "--target", "toy:vocab=4", "--device", "tp"])
        assert end.value.code == 2
        assert "torchrun --nproc-per-node" in capsys.readouterr().err

    def test_the_first_process_leads(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        for rank, followed in (("0", False), ("1", True)):
            monkeypatch.setenv("RANK", rank)
            assert follows("tp") is followed
            assert not follows("cpu")
            assert not follows(None)
        assert parse_device("tp") == "tp"

    def test_drafts_are_whole_and_targets_go_to_transformers(self, tmp_path):
        assert draft_device("tp") is None
        assert draft_device("cuda:1") == "cuda:1"
        folder = folder_of("llama", tmp_path / "target")
        assert runtime_for(locate(folder), device="tp")[0] == "hf"

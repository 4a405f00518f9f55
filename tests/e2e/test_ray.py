"""A cluster of one machine: workers that die, benches and audits spread out, and a server."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outrider import Engine
from outrider.cli.main import main
from outrider.engine.cluster import Share, connected, workers
from outrider.errors import ModelError, UsageError
from tests.patience import HANGS_S

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.slow

TARGET = "toy:vocab=8,seed=1"
PROMPT = "abcabcab"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # What is slow to start on a busy machine is given up after five seconds otherwise.
    os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = str(HANGS_S)
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100_000_000,
        log_to_driver=False,
        logging_level="error",
    )
    yield
    ray.shutdown()


def test_there_is_no_cluster_at_an_address_without_one():
    """Runs first: the others' cluster stays joined."""
    with pytest.raises(ModelError, match="no Ray cluster"), connected("127.0.0.1:1"):
        pass


class Dies:
    """Ends its process the first time that it is asked for one of the numbers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.worker = ""

    def square(self, number: int) -> tuple[int, int]:
        mark = self.folder / str(number)
        if number % 4 == 3 and not mark.exists():
            mark.touch()
            os._exit(1)
        return number**2, os.getpid()

    def threads(self) -> tuple[str, int]:
        import torch

        return os.environ["OMP_NUM_THREADS"], torch.get_num_threads()

    def refuse(self) -> None:
        raise UsageError("It is wrong.", hint="Do it right.")


def test_a_job_whose_worker_dies_is_begun_again(cluster, tmp_path):
    with workers(lambda: Dies(tmp_path), 2, Share(1)) as team:
        found = dict(team.map("square", [(n,) for n in range(8)]))
        assert {n: value for n, (value, _) in found.items()} == {n: n**2 for n in range(8)}
        assert len(list(tmp_path.iterdir())) == 2  # it did die
        assert {pid for _, pid in found.values()}.isdisjoint({os.getpid()})
        assert team.each("threads") == [("1", 1)] * 2
        with pytest.raises(UsageError, match="It is wrong") as told:
            team.each("refuse")
        assert told.value.hint == "Do it right."


def test_a_worker_that_cannot_load_says_why(cluster):
    def make() -> Any:
        return Engine.load("/nowhere/at/all")

    with pytest.raises(ModelError, match="nowhere"), workers(make, 1, Share(1)):
        pass


def command(capsys: Any, *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    code = 0
    try:
        main([*arguments, "--target", TARGET, "--json"])
    except SystemExit as end:
        code = int(end.code or 0)
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code in (0, 3)
    return told


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_an_audit_finds_the_same_on_a_cluster(cluster, capsys, rule):
    options = [
        "audit", "--sampled", "--drafter", "ngram", "--rule", rule, "--prompt", PROMPT,
        "--samples", "60", "--seed", "3", "--draft-length", "2",
    ]  # fmt: skip
    alone = command(capsys, *options)
    assert command(capsys, *options, "--ray", "--workers", "2") == alone
    assert alone["drafted_tokens"]


def test_a_bench_on_a_cluster_names_who_measured(cluster, capsys, tmp_path):
    prompts, log = tmp_path / "prompts.txt", tmp_path / "log.jsonl"
    prompts.write_text("abab\ncdcd\nabcd\nddda\n")
    options = [
        "bench", "--drafter", "ngram", "--prompts", str(prompts), "-n", "8", "--log", str(log),
        "--ray", "--workers", "2",
    ]  # fmt: skip
    told = command(capsys, *options)
    assert any("2 workers on 1 machine:" in note for note in told["notes"])
    records = [
        line for line in map(json.loads, log.read_text().splitlines()) if "configuration" in line
    ]
    assert len(records) == 8
    by_prompt: dict[int, set[str]] = {}
    for record in records:
        by_prompt.setdefault(record["prompt"], set()).add(record["worker"])
    assert all(len(names) == 1 for names in by_prompt.values())
    command(capsys, *options)  # nothing is left to do
    assert len(log.read_text().splitlines()) >= len(records)


def test_a_server_that_does_not_start_says_why(cluster, monkeypatch):
    from outrider.serve import ray_server
    from outrider.serve.limits import Limits
    from outrider.serve.ray_app import Plan, Scale

    def give_up(**options: Any) -> None:
        raise ray.exceptions.RayError("the listener is dead")

    monkeypatch.setattr(ray_server.serve, "start", give_up)
    plan = Plan(
        TARGET, {"drafter": "ngram"}, "toy", "ngram", Limits(), max_batch=4, queue=16,
        cache_bytes=None, share=Share(1),
    )  # fmt: skip
    with pytest.raises(ModelError, match="could not be started: the listener is dead"):
        ray_server.run(
            plan, Scale(1, 1), cluster="auto", host="127.0.0.1", port=0, drain_s=1.0, ready=print
        )


class Serving:
    """``outrider serve --ray`` in a thread: two replicas, or as many as requests want."""

    def __init__(self, least: int = 2, max_batch: int = 4) -> None:
        from outrider.serve.address import bind
        from outrider.serve.limits import Limits
        from outrider.serve.ray_app import Plan, Scale
        from outrider.serve.ray_server import run

        with bind("127.0.0.1", 0) as taken:
            self.port = taken.getsockname()[1]
        self.stop, self.ready = threading.Event(), threading.Event()
        plan = Plan(
            TARGET, {"drafter": "ngram"}, "toy", "ngram", Limits(), max_batch=max_batch, queue=16,
            cache_bytes=None, share=Share(1),
        )  # fmt: skip
        options = {"cluster": "auto", "host": "127.0.0.1", "port": self.port, "drain_s": 60.0}
        self.thread = threading.Thread(
            target=run,
            args=(plan, Scale(least, 2)),
            kwargs=options | {"ready": self.ready.set, "stop": self.stop, "api_key": "key"},
        )
        self.thread.start()
        end = time.monotonic() + HANGS_S
        while not self.ready.wait(0.2):
            assert self.thread.is_alive(), "it did not start"
            assert time.monotonic() < end

    def ask(self, path: str, body: dict[str, Any] | None = None, key: str = "key") -> Any:
        return urllib.request.urlopen(
            urllib.request.Request(
                f"http://127.0.0.1:{self.port}{path}",
                data=None if body is None else json.dumps(body).encode(),
                headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
            ),
            timeout=HANGS_S,
        )

    def complete(self, seed: int | None, max_tokens: int = 400, **more: Any) -> Any:
        body = {"model": "toy", "prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True}
        return self.ask("/v1/completions", body | {"seed": seed, "temperature": 1.0} | more)


@pytest.fixture(scope="module")
def serving(cluster) -> Iterator[Serving]:
    made = Serving()
    yield made
    made.stop.set()
    made.thread.join(HANGS_S)
    assert not made.thread.is_alive()


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(TARGET, drafter="ngram")


def text(engine: Engine, seed: int, max_tokens: int = 400) -> str:
    return engine.generate(
        PROMPT, seed=seed, max_tokens=max_tokens, temperature=1.0, ignore_eos=True
    ).text


def replicas() -> list[Any]:
    names = ray.util.list_named_actors(all_namespaces=True)
    return [
        ray.get_actor(one["name"], namespace=one["namespace"])
        for one in names
        if "replica" in one["name"].split("#")
    ]


def test_no_request_is_lost_with_its_replica(serving, engine):
    """Half of what was taken is at a replica that dies; all of it is answered, and rightly."""
    assert len(replicas()) == 2
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(lambda s=s: json.load(serving.complete(s))) for s in range(36)]
        while not any(one.done() for one in asked):
            time.sleep(0.01)
        ray.kill(replicas()[0])
        killed_with_work_left = sum(not one.done() for one in asked)
        answers = [one.result() for one in asked]
    assert killed_with_work_left > 8
    for seed, answer in enumerate(answers):
        assert answer["choices"][0]["text"] == text(engine, seed), seed


def test_a_stream_is_the_same_text_in_pieces(serving, engine):
    with serving.complete(5, 60, stream=True) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.read().decode().split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert len(chunks) > 3
    assert "".join(c["choices"][0]["text"] for c in chunks) == text(engine, 5, 60)


def test_the_front_answers_for_all_replicas(serving):
    assert json.load(serving.ask("/ready")) == {"status": "ready"}
    assert json.load(serving.ask("/v1/models"))["data"][0]["id"] == "toy"
    assert {json.load(serving.complete(None))["usage"]["completion_tokens"] for _ in "ab"} == {400}
    end = time.monotonic() + HANGS_S
    told = ""
    while told.count("outrider_running{") != 2:  # until the one that was killed is replaced
        assert time.monotonic() < end, told
        told = serving.ask("/metrics").read().decode()
    for status, ask in (
        (401, lambda: serving.ask("/v1/models", key="wrong")),
        (404, lambda: serving.ask("/nothing")),
        (400, lambda: serving.complete(1, temperature=-1.0)),
        (413, lambda: serving.complete(1, prompt="a" * 1_100_000)),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask()
        assert refused.value.code == status
        assert "message" in json.load(refused.value)["error"]


def test_the_end_waits_for_what_was_taken(serving, engine):
    """Runs after all that ask this server."""
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(lambda s=s: json.load(serving.complete(s, 1500))) for s in range(6)]
        time.sleep(0.5)
        serving.stop.set()
        for seed, one in enumerate(asked):
            assert one.result()["choices"][0]["text"] == text(engine, seed, 1500)
        serving.thread.join(HANGS_S)
    assert not serving.thread.is_alive()
    assert not replicas()


def test_there_are_more_replicas_when_there_is_more_to_do(cluster, engine):
    """Runs last: the server before it has ended. Ray waits half a minute before it adds one."""
    made = Serving(least=1, max_batch=1)
    done, enough = [], threading.Event()

    def keep_asking(seed: int) -> None:
        while not enough.is_set():
            done.append((seed, json.load(made.complete(seed))["choices"][0]["text"]))

    try:
        assert len(replicas()) == 1
        with ThreadPoolExecutor(6) as pool:
            asking = [pool.submit(keep_asking, seed) for seed in range(6)]
            try:
                end = time.monotonic() + HANGS_S
                while len(replicas()) < 2:
                    assert time.monotonic() < end
                    time.sleep(0.5)
                begun = len(done)
                while len(done) < begun + 12:
                    assert time.monotonic() < end
                    time.sleep(0.1)
            finally:
                enough.set()
            for one in asking:
                one.result()
        assert all(answer == text(engine, seed) for seed, answer in done)
    finally:
        made.stop.set()
        made.thread.join(HANGS_S)
    assert not made.thread.is_alive()

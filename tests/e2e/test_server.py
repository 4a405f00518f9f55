"""The server as its clients meet it: a process of its own, a port, and OpenAI's own client."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from outrider import Engine
from tests.patience import HANGS_S
from tests.small_models import new_module
from tests.tokenizers_for_tests import new_byte_level

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")

TOY = "toy:vocab=8,seed=1"
WAIT_S = HANGS_S


@dataclass
class Server:
    """A running server and what it told."""

    process: subprocess.Popen[str]
    address: str
    model: str

    def client(self, key: str = "any", **options: Any) -> Any:
        return openai.OpenAI(
            base_url=f"{self.address}/v1", api_key=key, max_retries=0, timeout=WAIT_S, **options
        )

    def metric(self, name: str) -> float:
        text = urllib.request.urlopen(f"{self.address}/metrics", timeout=WAIT_S).read().decode()
        lines = (line.rsplit(" ", 1) for line in text.splitlines())
        return next((float(n) for key, n in lines if key == name), 0.0)

    def wait_for(self, name: str, value: float) -> None:
        end = time.monotonic() + WAIT_S
        while self.metric(name) != value:
            assert time.monotonic() < end, (name, self.metric(name))
            time.sleep(0.02)


def start(
    *arguments: str, env: dict[str, str] | None = None, stderr: Any = subprocess.PIPE
) -> Server:
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider.cli.main", "serve", "--port", "0", "--json", *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        pytest.fail(f"no server: {process.communicate()[1]}")
    return Server(process, **json.loads(line))


def end(server: Server) -> str:
    """Its log, once it has ended."""
    server.process.send_signal(signal.SIGTERM)
    _, log = server.process.communicate(timeout=WAIT_S)
    assert server.process.returncode == 0, log
    return log


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A small model with a chat template, on disk."""
    path = tmp_path_factory.mktemp("model")
    words = new_byte_level()
    words.model_input_names = ["input_ids", "attention_mask"]
    new_module("llama", vocab_size=len(words)).save_pretrained(path)
    words.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def server(folder) -> Iterator[Server]:
    made = start(
        "--target", folder, "--runtime", "hf", "--name", "small", "--drafter", "ngram",
        "--max-batch", "4",
    )  # fmt: skip
    yield made
    log = end(made)
    for line in log.splitlines():
        json.loads(line)  # nothing else is said there
    assert "Traceback" not in log


@pytest.fixture(scope="module")
def engine(folder) -> Engine:
    return Engine.load(folder, runtime="hf", drafter="ngram")


MESSAGES = [{"role": "user", "content": "the the the in the"}]
ASKED: dict[str, Any] = {
    "model": "small", "messages": MESSAGES, "max_tokens": 16, "seed": 5, "temperature": 0.8
}  # fmt: skip


def test_a_chat_by_openais_client(server, engine):
    client = server.client()
    assert [model.id for model in client.models.list()] == ["small"]
    asked = {"n": 2, "logprobs": True, "top_logprobs": 2, "frequency_penalty": 0.3}
    answer = client.chat.completions.create(**ASKED, **asked)
    expected = engine.generate(
        MESSAGES, max_tokens=16, seed=5, temperature=0.8, frequency_penalty=0.3
    )
    first, second = answer.choices
    assert first.message.content == expected.text
    assert second.message.content != expected.text
    assert first.finish_reason == expected.finish_reason
    assert len(first.logprobs.content) == len(expected.token_ids)
    assert all(len(token.top_logprobs) == 2 for token in first.logprobs.content)
    assert answer.usage.prompt_tokens == len(engine.encode(MESSAGES))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.system_fingerprint.startswith("fp_")
    assert answer.outrider["trace"]["emitted_tokens"] == answer.usage.completion_tokens
    assert answer._request_id


def test_a_stream_by_openais_client(server):
    client = server.client()
    whole = client.chat.completions.create(**ASKED, n=2)
    texts, reasons, usage, origins = ["", ""], [None, None], None, set()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in client.chat.completions.create(**ASKED, n=2, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            told = choice.model_extra.get("outrider", {}).get("tokens", [])
            origins |= {token["origin"] for token in told}
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    assert origins <= {"accepted", "correction", "bonus", "plain"}
    assert origins


def test_a_completion_stops_and_speculation_changes_no_text(server):
    client = server.client()
    base = {"model": "small", "prompt": "the in the in the", "max_tokens": 40, "seed": 3}
    plain = client.completions.create(**base, extra_body={"speculation": False})
    for drafter in ("ngram", "suffix"):
        how = {"speculation": {"drafter": drafter, "draft_length": 4}}
        drafted = client.completions.create(**base, extra_body=how)
        assert drafted.choices[0].text == plain.choices[0].text
        assert drafted.outrider["drafter"] == drafter
    text = plain.choices[0].text
    stop = text[len(text) // 2 :][:2]
    stopped = client.completions.create(**base, stop=stop)
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_the_same_alone_and_in_company(server):
    client = server.client()
    alone = client.chat.completions.create(**ASKED).choices[0].message.content
    found: list[str | None] = []

    def ask() -> None:
        found.append(client.chat.completions.create(**ASKED).choices[0].message.content)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert found == [alone] * 6


def test_errors_by_openais_client(server):
    client = server.client()
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(**ASKED, tools=[tool])
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASKED | {"max_tokens": 10**5})
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**ASKED | {"model": "other"})
    with pytest.raises(openai.BadRequestError, match="model:"):
        client.chat.completions.create(
            **ASKED, extra_body={"speculation": {"drafter": "model:/etc/passwd"}}
        )


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_places(server, stream):
    before = server.metric("outrider_disconnects_total")
    emitted = server.metric("outrider_target_calls_total")
    body = ASKED | {"max_tokens": 900, "n": 4, "stream": stream, "ignore_eos": True}
    data = json.dumps(body).encode()
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as wire:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        wire.sendall(head.encode() + data)
        if stream:
            assert b"200" in wire.recv(100)
        else:
            server.wait_for("outrider_running", 4)
    server.wait_for("outrider_running", 0)
    assert server.metric("outrider_disconnects_total") == before + 1
    assert server.metric("outrider_target_calls_total") - emitted < 3600
    answer = server.client().chat.completions.create(**ASKED)  # all is well
    assert answer.choices


def test_a_full_queue_and_an_end_in_good_order():
    key = {"OUTRIDER_API_KEY": "secret"}
    made = start("--target", TOY, "--max-batch", "1", "--queue", "0", env=key)
    try:
        client = made.client("secret")
        with pytest.raises(openai.AuthenticationError):
            made.client("wrong").models.list()
        body = {"model": TOY, "prompt": "abab", "max_tokens": 1500, "seed": 1}
        stream = client.completions.create(**body, stream=True)
        text = next(stream).choices[0].text
        with pytest.raises(openai.RateLimitError) as full:
            client.completions.create(**body)
        assert int(full.value.response.headers["retry-after"]) >= 1
        made.process.send_signal(signal.SIGTERM)
        late = _status_once_draining(made)
        assert late == 503
        with pytest.raises(openai.InternalServerError) as stopping:
            client.completions.create(**body)
        assert stopping.value.status_code == 503
        reason = None
        for chunk in stream:
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason or reason
        assert (len(text), reason) == (1500, "length")
        _, log = made.process.communicate(timeout=WAIT_S)
        assert made.process.returncode == 0
        events = [json.loads(line)["event"] for line in log.splitlines()]
        assert events.index("draining") < events.index("stopped")
        assert "secret" not in log
    finally:
        made.process.kill()
        made.process.wait()


def _status_once_draining(server: Server) -> int:
    for _ in range(400):
        try:
            urllib.request.urlopen(f"{server.address}/ready", timeout=WAIT_S)
        except urllib.error.HTTPError as error:
            return error.code
        time.sleep(0.02)
    return 200


def test_a_port_that_is_taken_is_told_before_anything_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "outrider.cli.main", "serve", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 2
    assert f"Port {port}" in done.stderr
    assert "Traceback" not in done.stderr


# --- clients that misbehave ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Iterator[Server]:
    # More is logged than fits into a pipe that nobody reads, which would hold the server up.
    with open(tmp_path_factory.mktemp("log") / "stderr", "w+") as log:
        made = start("--target", TOY, "--max-batch", "4", "--queue", "100", stderr=log)
        yield made
        end(made)
        log.seek(0)
        assert "Traceback" not in log.read()


PROBE = {"model": TOY, "prompt": "abcabcab", "max_tokens": 60, "seed": 7, "temperature": 0.8}


def wire_to(server: Server, **body: Any) -> socket.socket:
    """A connection on which a request has been sent, and of which little is read ahead."""
    data = json.dumps(body).encode()
    host, port = server.address.removeprefix("http://").split(":")
    wire = socket.socket()
    wire.settimeout(WAIT_S)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    wire.sendall(head.encode() + data)
    return wire


def probe(server: Server) -> tuple[str, str]:
    """One request's text, drafted and plain."""
    client = server.client()
    plain = client.completions.create(**PROBE, extra_body={"speculation": False})
    return client.completions.create(**PROBE).choices[0].text, plain.choices[0].text


def test_connections_dropped_at_any_token_leave_nothing_behind(toy):
    before, plain = probe(toy)
    assert before == plain
    chance = random.Random(18)
    long = {"max_tokens": 2000, "ignore_eos": True}
    for turn in range(200):
        wire = wire_to(toy, **PROBE | long | {"seed": turn, "stream": turn % 4 > 0})
        if turn % 4:
            seen, wanted = b"", chance.randrange(1, 40)
            while seen.count(b"data:") < wanted:
                seen += wire.recv(chance.choice([64, 4096]))
        if turn % 2:  # a reset in place of a farewell
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wire.close()
    toy.wait_for("outrider_running", 0)
    toy.wait_for("outrider_waiting", 0)
    assert toy.metric("outrider_disconnects_total") >= 150  # all that streamed, at least
    assert probe(toy) == (before, plain)


def test_slow_readers_hold_up_nobody(toy):
    before, plain = probe(toy)
    process = psutil.Process(toy.process.pid)
    answered = 'outrider_requests_total{path="/v1/completions",status="200"}'
    told, rss = toy.metric(answered), process.memory_info().rss
    slow = {"max_tokens": 40, "logprobs": 8, "stream": True, "ignore_eos": True}
    large = {"max_tokens": 300, "n": 16}  # more than the system holds on its way
    wires = [wire_to(toy, **PROBE | slow | large)]
    wires += [wire_to(toy, **PROBE | slow | {"seed": seed}) for seed in range(23)]
    try:
        assert probe(toy) == (before, plain)  # in their midst
        toy.wait_for("outrider_running", 0)  # all are made, though none is read
        toy.wait_for("outrider_waiting", 0)
        assert toy.metric(answered) - told <= 2 + 23  # the large one is not through
        assert process.memory_info().rss - rss < 150e6
        whole = b""
        while b"data: [DONE]" not in whole:
            whole += wires[0].recv(2**20)
        assert whole.count(b'"origin"') == 16 * 300
    finally:
        for wire in wires:
            wire.close()
    assert probe(toy) == (before, plain)


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies_are_refused_before_they_are_there(toy, chunked):
    host, port = toy.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as wire:
        length = "Transfer-Encoding: chunked" if chunked else "Content-Length: 10000000"
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n{length}\r\n"
        wire.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode())
        part = b" " * 50_000
        for _ in range(21):  # of the ten megabytes one and a bit
            wire.sendall(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
        assert b" 413 " in wire.recv(4096).partition(b"\r\n")[0]


def test_a_host_that_is_not_ours_is_refused(toy):
    for host, status in (("evil.example", 421), (toy.address.removeprefix("http://"), 200)):
        request = urllib.request.Request(f"{toy.address}/v1/models", headers={"Host": host})
        try:
            found = urllib.request.urlopen(request, timeout=WAIT_S).status
        except urllib.error.HTTPError as error:
            found = error.code
        assert found == status


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_disk_under_the_log_stops_nobody():
    with open("/dev/full", "w") as full:
        made = start("--target", TOY, stderr=full)
    try:
        first, plain = probe(made)
        assert first == plain
        with pytest.raises(openai.NotFoundError):
            made.client().completions.create(**PROBE | {"model": "other"})
        for _ in range(30):  # more lines than a buffer holds
            assert made.client().models.list().data
        assert probe(made) == (first, plain)
        made.process.send_signal(signal.SIGTERM)
        assert made.process.wait(WAIT_S) == 0
    finally:
        made.process.kill()
        made.process.wait()


def test_a_log_that_nobody_reads_stops_nobody():
    made = start("--target", TOY)  # its log goes into a pipe that is read at the end alone
    try:
        first = probe(made)
        agent = "a" * 1000
        for _ in range(150):  # a pipe holds 64 kB
            made.client().models.list(extra_headers={"X-Request-Id": agent[:100]})
            with pytest.raises(openai.NotFoundError):
                made.client().completions.create(**PROBE | {"model": "other", "user": agent[:60]})
        assert probe(made) == first
        made.process.send_signal(signal.SIGTERM)
        assert made.process.wait(WAIT_S) == 0
    finally:
        made.process.kill()
        made.process.wait()


def test_an_end_without_patience_is_told():
    made = start("--target", TOY, "--max-batch", "1", "--drain", "0")
    try:
        client = made.client()
        stream = client.completions.create(**PROBE | {"max_tokens": 4000}, stream=True)
        next(stream)
        made.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="stopped before this was done"):
            for _ in stream:
                pass
        _, log = made.process.communicate(timeout=WAIT_S)
        assert made.process.returncode == 0
        events = [json.loads(line)["event"] for line in log.splitlines()]
        assert "drain_limit_reached" in events
    finally:
        made.process.kill()
        made.process.wait()

"""The server's paths, without a network: answers, refusals, keys, probes and counters."""

from __future__ import annotations

import io
import json
import logging

import pytest
import torch
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from outrider import Engine
from outrider.drafters.none import NoDrafter
from outrider.errors import UsageError
from outrider.models.hf import HFModel
from outrider.models.tokenizer import HFTokenizer, ToyTokenizer
from outrider.models.toy import ToyModel
from outrider.serve import logs
from outrider.serve.address import address_of, bind, hosts_for
from outrider.serve.app import Service, create_app
from outrider.serve.limits import Limits
from outrider.serve.orders import Order
from tests.small_models import new_module
from tests.tokenizers_for_tests import new_byte_level

V = 8
END = V - 1
TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
LIMITS = Limits(max_tokens=64, body_bytes=4000, stops=2, stop_characters=5, logit_bias=3)


def toy() -> Engine:
    return Engine(ToyModel.random(V, 1, context_length=100), ToyTokenizer(V, [END]))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return toy()


@pytest.fixture(scope="module")
def client(engine):
    with TestClient(create_app(Service(engine, "toy", limits=LIMITS))) as made:
        yield made


@pytest.fixture(scope="module")
def chat():
    """A small model with a chat template."""
    words = new_byte_level()
    module = new_module("llama", vocab_size=len(words))
    engine = Engine(HFModel(module), HFTokenizer(words), drafter="ngram")
    with TestClient(create_app(Service(engine, "m"))) as made:
        made.engine = engine
        yield made


def ask(client, path=TEXT, /, **body):
    base = {"model": "toy", "prompt": "abab", "seed": 1} if path == TEXT else {"model": "m"}
    return client.post(path, json=base | body)


def chunks(response) -> list[dict]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# --- completions ---------------------------------------------------------------------------------


def test_an_answer_is_what_the_library_gives(client, engine):
    how = {"max_tokens": 20, "temperature": 0.7, "top_k": 4, "presence_penalty": 0.2, "seed": 9}
    expected = engine.generate("abab", **how)
    body = ask(client, **how).json()
    (choice,) = body["choices"]
    assert choice["text"] == expected.text
    assert choice["finish_reason"] == expected.finish_reason
    assert [t["id"] for t in choice["outrider"]["tokens"]] == expected.token_ids
    assert [t["origin"] for t in choice["outrider"]["tokens"]] == expected.origins
    counts = len(expected.token_ids)
    assert body["usage"] == {
        "prompt_tokens": 4, "completion_tokens": counts, "total_tokens": 4 + counts
    }  # fmt: skip
    ours, theirs = body["outrider"]["trace"], expected.trace.summary()
    same = ("drafted_tokens", "accepted_tokens", "target_calls", "emitted_tokens")
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    assert body["outrider"]["rule"] == "coupled"
    assert body["outrider"]["seed"] == 9
    assert body["system_fingerprint"].startswith("fp_")


def test_the_defaults_are_the_protocols(client, engine):
    expected = engine.generate("abab", temperature=1.0, max_tokens=16, seed=1)
    assert ask(client).json()["choices"][0]["text"] == expected.text


@pytest.mark.parametrize(
    "prompt", ["abab", ["abab"], [0, 1, 0, 1], [[0, 1, 0, 1]]], ids=["text", "texts", "ids", "both"]
)
def test_prompts_come_in_four_forms(client, engine, prompt):
    expected = engine.generate("abab", temperature=1.0, max_tokens=16, seed=1)
    assert ask(client, prompt=prompt).json()["choices"][0]["text"] == expected.text


def test_several_prompts_with_several_outputs_each(client):
    body = ask(client, prompt=["ab", "cdc"], n=2).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 5
    alone = [
        choice["text"]
        for p in ("ab", "cdc")
        for choice in ask(client, prompt=p, n=2).json()["choices"]
    ]
    assert [choice["text"] for choice in body["choices"]] == alone
    assert alone[0] != alone[1]


@pytest.mark.parametrize("stop", [(), ["c", "dd"]])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_stream_says_what_a_whole_answer_says(client, stop, temperature):
    how = {"n": 2, "logprobs": 2, "max_tokens": 30, "stop": list(stop), "temperature": temperature}
    whole = ask(client, **how).json()
    told = chunks(ask(client, stream=True, stream_options={"include_usage": True}, **how))
    assert len({chunk["id"] for chunk in told}) == 1
    for index, choice in enumerate(whole["choices"]):
        mine = [c for chunk in told for c in chunk["choices"] if c["index"] == index]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        tokens = [t for c in mine for t in c["outrider"].get("tokens", [])]
        assert tokens == choice["outrider"]["tokens"]
        for name, values in choice["logprobs"].items():
            assert [v for c in mine if c["logprobs"] for v in c["logprobs"][name]] == values
    assert told[-1]["usage"] == whole["usage"]
    assert told[-1]["choices"] == []


def test_stops_end_penalties_and_biases_as_in_the_library(client, engine):
    cases = [
        {"stop": "c"},
        {"stop": ["bb", "d"]},
        {"stop_token_ids": [2]},
        {"ignore_eos": True},
        {"min_tokens": 12},
        {"frequency_penalty": 1.5, "presence_penalty": -0.5, "repetition_penalty": 1.2},
        {"min_p": 0.2, "top_p": 0.8},
    ]
    for case in cases:
        how = {"max_tokens": 40, "temperature": 1.0, "seed": 2, **case}
        expected = engine.generate("abab", **how)
        (choice,) = ask(client, **how).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
    biased = ask(client, max_tokens=9, logit_bias={"3": 100}).json()["choices"][0]
    assert biased["text"] == "d" * 9


def test_an_end_token_is_counted_and_has_a_logprob(client):
    body = ask(client, max_tokens=60, logit_bias={str(END): 100}, logprobs=0).json()
    assert body["usage"]["completion_tokens"] == 1
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert choice["logprobs"]["tokens"] == ["h"]


def test_speculation_is_asked_for_by_request(client):
    off = ask(client, speculation=False, temperature=0).json()["outrider"]
    assert (off["drafter"], off["trace"]["drafted_tokens"]) == ("none", 0)
    on = {"drafter": "suffix", "rule": "rejection", "draft_length": 3}
    told = ask(client, speculation=on, prompt="abcabcabc").json()["outrider"]
    assert (told["drafter"], told["rule"]) == ("suffix", "rejection")
    assert told["trace"]["drafted_tokens"] > 0


# --- chats ---------------------------------------------------------------------------------------


def test_a_chat(chat):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "a"}],
        },
        {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "again"},
    ]
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say a"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "again"},
    ]
    how = {"seed": 4, "temperature": 1.0}
    expected = chat.engine.generate(plain, max_tokens=12, **how)
    body = ask(
        chat,
        CHAT,
        messages=messages,
        max_completion_tokens=12,
        logprobs=True,
        top_logprobs=3,
        **how,
    ).json()
    (choice,) = body["choices"]
    assert choice["message"]["content"] == expected.text
    assert choice["message"]["role"] == "assistant"
    assert body["usage"]["prompt_tokens"] == len(chat.engine.encode(plain))
    content = choice["logprobs"]["content"]
    assert len(content) == len(expected.token_ids)
    said = b"".join(bytes(entry["bytes"]) for entry in content)
    assert said.decode(errors="replace").startswith(expected.text[:5])
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    streamed = chunks(ask(chat, CHAT, messages=messages, max_tokens=12, stream=True, **how))
    deltas = [c["delta"] for chunk in streamed for c in chunk["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content") or "" for delta in deltas) == expected.text
    assert streamed[0]["object"] == "chat.completion.chunk"


# --- refusals ------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "says"),
    [
        (TEXT, {"model": "other"}, 404, "model_not_found", "there is 'toy'"),
        (TEXT, {"max_tokns": 3}, 400, "unknown_parameter", "'max_tokens'"),
        (TEXT, {"suffix": "x"}, 400, "unsupported_parameter", "'suffix'"),
        (TEXT, {"echo": True}, 400, "invalid_value", "'echo'"),
        (TEXT, {"best_of": 2}, 400, "invalid_value", "'best_of'"),
        (TEXT, {"best_of": True}, 400, "invalid_value", "'best_of': "),
        (TEXT, {"echo": 0.0}, 400, "invalid_value", "'echo': "),
        (TEXT, {"speculation": 0}, 400, "invalid_value", "'speculation': "),
        (TEXT, {"prompt": "a!"}, 400, "invalid_prompt", "'!'"),
        (TEXT, {"prompt": ""}, 400, "invalid_prompt", "empty"),
        (TEXT, {"prompt": []}, 400, "invalid_prompt", "no prompt"),
        (TEXT, {"prompt": [[]]}, 400, "invalid_prompt", "empty"),
        (TEXT, {"prompt": [V]}, 400, "invalid_prompt", "from 0 to 7"),
        (TEXT, {"prompt": {"a": 1}}, 400, "invalid_value", "'prompt'"),
        (TEXT, {"prompt": "a" * 100}, 400, "context_length_exceeded", "100 tokens"),
        (TEXT, {"prompt": "a" * 90, "max_tokens": 20}, 400, "context_length_exceeded", "20 more"),
        (TEXT, {"n": 0}, 400, "invalid_value", "'n'"),
        (TEXT, {"n": 17}, 400, "limit_exceeded", "16"),
        (TEXT, {"n": 9, "prompt": ["a", "b"]}, 400, "limit_exceeded", "16"),
        (TEXT, {"n": True}, 400, "invalid_value", "'n'"),
        (TEXT, {"max_tokens": 65}, 400, "limit_exceeded", "64"),
        (TEXT, {"n": -1}, 400, "invalid_value", "'n'"),
        (TEXT, {"n": 10**12}, 400, "limit_exceeded", "16"),
        (TEXT, {"max_tokens": 0}, 400, "invalid_value", "'max_tokens'"),
        (TEXT, {"max_tokens": -5}, 400, "invalid_value", "'max_tokens'"),
        (TEXT, {"max_tokens": 10**15}, 400, "limit_exceeded", "64"),
        (TEXT, {"min_tokens": -1}, 400, "invalid_value", "min_tokens"),
        (TEXT, {"logprobs": -1}, 400, "invalid_value", "'logprobs'"),
        (TEXT, {"stop_token_ids": [-1]}, 400, "invalid_value", "stop_token_ids"),
        (TEXT, {"prompt": [-1]}, 400, "invalid_prompt", "from 0 to 7"),
        (TEXT, {"prompt": [[0]] * 17}, 400, "limit_exceeded", "16"),
        (TEXT, {"speculation": {"draft_length": -1}}, 400, "invalid_value", "64"),
        (TEXT, {"max_tokens": "5"}, 400, "invalid_value", "'max_tokens'"),
        (TEXT, {"temperature": -1}, 400, "invalid_value", "temperature"),
        (TEXT, {"top_p": 0}, 400, "invalid_value", "top_p"),
        (TEXT, {"top_k": -3}, 400, "invalid_value", "top_k"),
        (TEXT, {"seed": 2**63}, 400, "invalid_value", "'seed'"),
        (TEXT, {"stop": ["a"] * 3}, 400, "limit_exceeded", "2"),
        (TEXT, {"stop": "a" * 6}, 400, "limit_exceeded", "5"),
        (TEXT, {"stop": ""}, 400, "invalid_value", "empty"),
        (TEXT, {"stop_token_ids": [V]}, 400, "invalid_value", "stop_token_ids"),
        (TEXT, {"stop_token_ids": [0] * 65}, 400, "limit_exceeded", "64"),
        (TEXT, {"logit_bias": {"a": 1}}, 400, "invalid_value", "logit_bias"),
        (TEXT, {"logit_bias": {"-1": 1}}, 400, "invalid_value", "logit_bias"),
        (TEXT, {"logit_bias": {"8": 1}}, 400, "invalid_value", "token 8"),
        (TEXT, {"logit_bias": {str(i): 1 for i in range(4)}}, 400, "limit_exceeded", "3"),
        (TEXT, {"logprobs": 21}, 400, "invalid_value", "'logprobs'"),
        (TEXT, {"stream_options": {"include_usage": True}}, 400, "invalid_value", "'stream'"),
        (TEXT, {"speculation": {"drafter": "model:/x"}}, 400, "invalid_value", "model:/x"),
        (TEXT, {"speculation": {"drafter": "ngram:2"}}, 400, "invalid_value", "ngram:2"),
        (TEXT, {"speculation": {"rule": "gredy"}}, 400, "invalid_value", "gredy"),
        (TEXT, {"speculation": {"rule": "greedy"}}, 400, "invalid_value", "temperature 0"),
        (TEXT, {"speculation": {"draft_length": 65}}, 400, "invalid_value", "64"),
        (TEXT, {"speculation": {"length": 5}}, 400, "unknown_parameter", "speculation.length"),
        (TEXT, {"speculation": True}, 400, "invalid_value", "'speculation'"),
        (TEXT, {"user": "x" * 257}, 400, "invalid_value", "'user'"),
        (CHAT, {"messages": MESSAGES}, 400, "invalid_prompt", "chat template"),
        (CHAT, {"messages": []}, 400, "invalid_value", "'messages'"),
        (CHAT, {}, 400, "invalid_value", "'messages'"),
        (CHAT, {"messages": MESSAGES, "tools": []}, 400, "invalid_value", "'tools'"),
        (
            CHAT,
            {"messages": MESSAGES, "response_format": {"type": "grammar"}},
            400,
            "unsupported_parameter",
            "'response_format'",
        ),
        (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, 400, "invalid_value", "role"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "invalid_value", "messages.0.content"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "invalid_value",
            "messages.0.content",
        ),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, 400, "invalid_value", "'logprobs'"),
        (CHAT, {"messages": MESSAGES * 1025}, 413, "body_too_large", "4,000 bytes"),
        (TEXT, {"min_tokens": 5, "max_tokens": 4}, 400, "invalid_value", "no text has both"),
        (TEXT, {"min_tokens": 17}, 400, "invalid_value", "'max_tokens' 16"),
        (TEXT, {"logit_bias": {"+1": 1}}, 400, "invalid_value", "'+1'"),
        (TEXT, {"logit_bias": {"1_0": 1}}, 400, "invalid_value", "'1_0'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(client, path, body, status, code, says):
    base = {"model": "toy"} | ({"prompt": "abab"} if path == TEXT else {})
    for stream in ({}, {"stream": True}):
        if stream and "stream_options" in body:
            continue
        response = client.post(path, json=base | body | stream)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (status, code), error
        assert says in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
        assert response.headers["x-request-id"]


def test_two_lengths_that_differ_are_refused(chat):
    response = ask(chat, CHAT, messages=MESSAGES, max_tokens=2, max_completion_tokens=3)
    assert response.status_code == 400
    assert "differ" in response.json()["error"]["message"]


def test_prompts_that_are_far_too_long_are_refused(chat):
    for body in ({"prompt": "a" * 200_000}, {"prompt": "ab " * 60_000}, {"prompt": [5] * 200_000}):
        refused = chat.post(TEXT, json={"model": "m"} | body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            400, "context_length_exceeded"
        )  # fmt: skip
    messages = [{"role": "user", "content": "a" * 200}] * 1000
    assert ask(chat, CHAT, messages=messages).status_code == 400
    assert ask(chat, CHAT, messages=MESSAGES, max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"null", 400),
        (b"[1]", 400),
        (b"{", 400),
        (b'{"model":"toy","prompt":"\xff"}', 400),
        (b'{"model":"toy","prompt":"\\ud800"}', 400),
        (b'{"model":"\\ud800","prompt":"a"}', 404),
        (b'{"model":"toy","prompt":"a","\\ud800":1}', 400),
        (b'{"model":"toy","prompt":"a","temperature":NaN}', 400),
        (b'{"model":"toy","prompt":"a","temperature":1e999}', 400),
        (b'{"model":"toy","prompt":"a","seed":' + b"9" * 3900 + b"}", 400),
        (b'{"model":"toy","prompt":' + b"[" * 1900 + b"]" * 1900 + b"}", 400),
        (b"[" * 3900, 400),
        ('{"model":"toy","prompt":"a"}'.encode("utf-16"), 400),
        ('{"model":"toy","prompt":"a"}'.encode("utf-32-be"), 400),
        (b" " * 4001, 413),
    ],
)
def test_bodies_that_are_no_requests(client, body, status):
    response = client.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == status
    assert response.json()["error"]["message"]


def test_a_body_of_unknown_length_is_bounded_too(client):
    def parts():
        for _ in range(100):
            yield b" " * 100

    response = client.post(TEXT, content=parts(), headers={"content-type": "application/json"})
    assert response.status_code == 413


def test_a_page_elsewhere_cannot_post_without_asking(client):
    body = json.dumps({"model": "toy", "prompt": "a"})
    response = client.post(TEXT, content=body, headers={"content-type": "text/plain"})
    assert response.status_code == 400
    ours = client.post(TEXT, json={"model": "toy", "prompt": "a"}, headers={"origin": "http://x"})
    assert "access-control-allow-origin" not in ours.headers


def test_paths_that_there_are_not(client):
    assert client.get("/v2").json()["error"]["type"] == "invalid_request_error"
    assert client.get("/docs").status_code == 404
    assert client.get(TEXT).status_code == 405
    assert client.get("/v1/models/other").status_code == 404


# --- what goes round -----------------------------------------------------------------------------


def test_models_probes_and_index(client, engine):
    assert client.get("/v1/models").json()["data"][0]["id"] == "toy"
    assert client.get("/v1/models/toy").json()["max_model_len"] == 100
    assert client.get("/health").status_code == client.get("/ready").status_code == 200
    assert CHAT in client.get("/").json()["paths"]
    schema = client.get("/openapi.json").json()
    assert "ChatRequest" in schema["components"]["schemas"]


def test_a_requests_id_is_the_clients_if_it_can_be_printed(client):
    sent = client.get("/", headers={"x-request-id": "abc-1"})
    assert sent.headers["x-request-id"] == "abc-1"
    for bad in ("a b", "x" * 65, 'a"b'):
        assert client.get("/", headers={"x-request-id": bad}).headers["x-request-id"] != bad


def test_counters(client):
    ask(client, prompt="abcabcabc", temperature=0)
    text = client.get("/metrics").text
    read = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    drafted = float(read['vllm:spec_decode_num_draft_tokens_total{model_name="toy"}'])
    accepted = float(read['vllm:spec_decode_num_accepted_tokens_total{model_name="toy"}'])
    assert drafted >= accepted >= 0
    assert drafted > 0
    assert float(read['outrider_requests_total{path="/v1/completions",status="200"}']) > 0
    assert float(read["outrider_running"]) == 0


def test_a_key_is_asked_for_but_by_probes(engine):
    with TestClient(create_app(Service(toy(), "toy", api_key="sécret"))) as client:
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic sécret"}):
            raw = {name: value.encode() for name, value in header.items()}
            response = client.get("/v1/models", headers=raw)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        right = {"authorization": "Bearer sécret".encode()}
        assert client.get("/v1/models", headers=right).status_code == 200
        assert client.get("/metrics").status_code == 401
        assert client.get("/health").status_code == client.get("/ready").status_code == 200


def test_keys_are_compared_in_constant_time(monkeypatch):
    from outrider.serve import envelope

    compared = []

    def noted(given, right):
        compared.append((given, right))
        return given == right

    monkeypatch.setattr(envelope.hmac, "compare_digest", noted)
    with TestClient(create_app(Service(toy(), "toy", api_key="secret"))) as client:
        for given in ("secret", "secre", "x"):
            status = client.get("/v1/models", headers={"authorization": f"Bearer {given}"})
            assert status.status_code == (200 if given == "secret" else 401)
    assert compared == [(given, b"secret") for given in (b"secret", b"secre", b"x")]


def test_requests_for_another_host_are_refused():
    hosts = hosts_for("127.0.0.1", ["llm.example"])
    with TestClient(create_app(Service(toy(), "toy", hosts=hosts))) as client:

        def status(host, path="/v1/models"):
            return client.get(path, headers={"host": host}).status_code

        for ours in ("127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "llm.example:443"):
            assert status(ours) == 200
        others = ("evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1", "", "[::2]", "x:y")
        for other in others:
            for path in ("/v1/models", "/", "/metrics", "/openapi.json"):
                assert status(other, path) == 421, other
            assert status(other, "/health") == status(other, "/ready") == 200
        refused = client.post(TEXT, json={}, headers={"host": "evil.example"})
        error = refused.json()["error"]
        assert error["code"] == "wrong_host"
        assert "evil.example" in error["message"]
        assert "--allow-host" in error["message"]


def test_names_of_hosts_are_checked_when_the_server_starts():
    assert hosts_for("0.0.0.0") is None
    assert "llm.example" in hosts_for("0.0.0.0", ["llm.example"])
    assert "127.0.0.2" in hosts_for("127.0.0.2")
    for wrong in ("llm.example:443", "http://llm.example", "", "a/b:"):
        with pytest.raises(UsageError, match="no name of a host"):
            hosts_for("127.0.0.1", [wrong])


def test_nothing_is_said_to_pages_elsewhere(client):
    asked = {"origin": "http://x", "access-control-request-method": "POST"}
    for path in (TEXT, CHAT, "/v1/models"):
        told = client.options(path, headers=asked)
        assert told.status_code == 405
        assert not [name for name in told.headers if name.startswith("access-control")]


def test_the_log_is_json_and_holds_no_text(client):
    stream = io.StringIO()
    names = ("outrider.serve", "uvicorn", "opentelemetry")
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    try:
        logs.to_stderr(stream)
        ask(client, prompt="cafe" * 4, user="me")
        loggers[0].handlers[0].close()  # until it is written
    finally:
        for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
    (line,) = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (line["event"], line["status"], line["path"]) == ("request", 200, TEXT)
    assert line["user"] == "me"
    assert line["prompt_tokens"] == 16
    assert len(line["request_id"]) == 32
    assert "cafe" not in stream.getvalue()


# --- what fails ----------------------------------------------------------------------------------


class Breaks(NoDrafter):
    name, default_length = "breaks", 2

    def start(self, prompt, capacity):
        return self

    def propose(self, tokens, length, pick):
        raise RuntimeError("broken draft")


def test_failures_are_told_and_leave_the_server_alone():
    model = ToyModel.random(V, 1)
    score = model.score

    def spoiled(cache, tokens, proposal):
        rows = score(cache, tokens, proposal)
        # From the fourth token on, so that a stream has begun.
        return rows * torch.nan if cache.tokens[0] == 3 and cache.length > 4 else rows

    model.score = spoiled
    engine = Engine(model, ToyTokenizer(V), drafter=Breaks())
    expected = Engine(ToyModel.random(V, 1), ToyTokenizer(V)).generate(
        "abab", temperature=1.0, max_tokens=16, seed=1, plain=True
    )
    service = Service(engine, "toy")
    with TestClient(create_app(service)) as client:
        bad = ask(client, prompt="dd")
        assert bad.status_code == 500
        assert bad.json()["error"]["code"] == "numerical_error"
        lines = [
            json.loads(line.removeprefix("data: "))
            for line in ask(client, prompt="dd", stream=True).text.split("\n\n")
            if line
        ]
        assert lines[0]["choices"]
        assert lines[-1]["error"]["code"] == "numerical_error"
        good = ask(client).json()
        assert good["choices"][0]["text"] == expected.text
        assert good["choices"][0]["outrider"]["drafter_failed"] is True
        service.scheduler.drain()
        late = ask(client)
        assert late.status_code == 503
        assert int(late.headers["retry-after"]) > 0
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200


def test_a_full_queue_is_a_429(monkeypatch):
    service = Service(toy(), "toy", max_batch=1, queue=0)
    with TestClient(create_app(service)) as client:
        score = service.engine.model.score
        answers = []

        def second_comes(cache, tokens, proposal):
            if not answers:
                answers.append(None)
                answers[0] = ask(client)
            return score(cache, tokens, proposal)

        monkeypatch.setattr(service.engine.model, "score", second_comes)
        assert ask(client).status_code == 200
        assert answers[0].status_code == 429
        assert answers[0].json()["error"]["type"] == "rate_limit_error"
        assert int(answers[0].headers["retry-after"]) > 0


def test_a_cache_that_can_never_fit_is_refused(monkeypatch):
    from outrider.serve import orders

    monkeypatch.setattr(orders, "cache_bytes", lambda engine, drafters, tokens: 10 * tokens)
    service = Service(toy(), "toy", cache_bytes=150)
    body = {"model": "toy", "prompt": "abab", "max_tokens": 11}
    with TestClient(create_app(service)) as client:
        assert client.post(TEXT, json=body).status_code == 200
        refused = client.post(TEXT, json=body | {"max_tokens": 12})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "out_of_memory"


def test_orders_hold_what_the_cache_will_need():
    assert Order([1]).cache_bytes == 0


# --- the command ---------------------------------------------------------------------------------


def test_what_the_command_lacks_is_told_first(monkeypatch):
    from outrider.cli import serve

    with pytest.raises(UsageError, match="empty"):
        CliRunner().invoke(serve.app, ["--api-key", " "], catch_exceptions=False)
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "uvicorn" else name)
    with pytest.raises(UsageError, match=r"uvicorn.*outrider\[serve\]"):
        CliRunner().invoke(serve.app, [], catch_exceptions=False)


def test_addresses():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert address_of(taken) == f"http://127.0.0.1:{port}"
        taken.listen()
        with pytest.raises(UsageError, match=f"Port {port}"):
            bind("127.0.0.1", port)
    with pytest.raises(UsageError, match="cannot be had"):
        bind("no.such.host.invalid", 0)

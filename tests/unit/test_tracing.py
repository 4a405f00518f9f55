"""Spans of requests: what is in them, what never is, and what a broken collector costs: nothing."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from outrider import Engine
from outrider.errors import UsageError
from outrider.models.tokenizer import ToyTokenizer
from outrider.models.toy import ToyModel
from outrider.serve.app import Service, create_app

pytest.importorskip("opentelemetry.exporter.otlp", reason="the extra 'tracing' is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from outrider.serve import tracing as module
from outrider.serve.tracing import Tracing, to_collector

V = 8
TEXT = "/v1/completions"
BODY = {"model": "toy", "prompt": "abcabcabc", "seed": 1, "max_tokens": 12}


def toy() -> Engine:
    return Engine(ToyModel.random(V, 1, context_length=2000), ToyTokenizer(V), drafter="ngram")


class Traced:
    """A server in this process and the spans that it made."""

    def __init__(self, engine: Engine) -> None:
        self.kept = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.kept))
        self.service = Service(engine, "toy", tracing=Tracing(provider, "127.0.0.1", 8000))
        self.client = TestClient(create_app(self.service))

    def spans(self, path=TEXT, /, headers=None, **body):
        self.kept.clear()
        self.response = self.client.post(path, json=BODY | body, headers=headers)
        spans = self.kept.get_finished_spans()
        return spans[-1], {span.name: span for span in spans[:-1]}


@pytest.fixture(scope="module")
def traced():
    made = Traced(toy())
    with made.client:
        yield made


def test_a_request_is_a_span_by_the_conventions(traced):
    span, _ = traced.spans(temperature=0.5, top_k=4, logprobs=1)
    answer = traced.response.json()
    told = dict(span.attributes)
    assert (span.name, span.kind) == ("text_completion toy", SpanKind.SERVER)
    assert span.status.status_code is StatusCode.UNSET
    trace = answer["outrider"]["trace"]
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": "toy",
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 4,
        "gen_ai.request.seed": 1,
        "gen_ai.request.choice.count": 1,
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.response.finish_reasons": ("length",),
        "http.route": TEXT,
        "http.response.status_code": 200,
        "server.address": "127.0.0.1",
        "server.port": 8000,
        "outrider.request_id": traced.response.headers["x-request-id"],
        "outrider.drafter": "ngram",
        "outrider.rule": "coupled",
        "outrider.acceptance_rate": trace["acceptance_rate"],
        "outrider.tokens_per_target_call": trace["tokens_per_target_call"],
    }
    assert {name: told.get(name) for name in expected} == expected
    assert "gen_ai.request.top_p" not in told  # it was not asked for


@pytest.mark.parametrize("stream", [True, False])
def test_its_parts_follow_each_other(traced, stream):
    span, parts = traced.spans(stream=stream)
    assert list(parts) == ["queue", "prefill", "decode"]
    times = [span.start_time]
    for part in parts.values():
        assert part.parent.span_id == span.context.span_id
        assert part.start_time <= part.end_time
        times += [part.start_time, part.end_time]
    assert times == sorted(times)
    assert parts["queue"].end_time == parts["prefill"].start_time
    assert parts["prefill"].end_time == parts["decode"].start_time
    assert parts["decode"].attributes["gen_ai.usage.output_tokens"] == 12
    (event,) = span.events
    assert event.name == "first_token"
    assert span.start_time <= event.timestamp <= span.end_time


def test_each_output_has_parts_of_its_own(traced):
    span, _ = traced.spans(prompt=["ab", "cd"], n=2)
    parts = traced.kept.get_finished_spans()[:-1]
    assert span.attributes["gen_ai.request.choice.count"] == 4
    assert len(span.attributes["gen_ai.response.finish_reasons"]) == 4
    assert sorted({part.attributes["outrider.output"] for part in parts}) == [0, 1, 2, 3]
    assert len(parts) == 12


def test_a_clients_trace_goes_on(traced):
    ours = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    span, _ = traced.spans(headers={"traceparent": ours})
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    for nonsense in ("", "00-xyz", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 5000):
        span, _ = traced.spans(headers={"traceparent": nonsense})
        assert traced.response.status_code == 200
        assert span.parent is None


def test_a_client_that_does_not_sample_has_no_spans(traced):
    traced.kept.clear()
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}
    assert traced.client.post(TEXT, json=BODY, headers=headers).status_code == 200
    assert not traced.kept.get_finished_spans()


def test_neither_prompts_nor_answers_are_told(traced):
    traced.spans(prompt="hghg" * 4, stop="ggg", user="someone")
    text = traced.response.json()["choices"][0]["text"]
    told = "".join(one.to_json() for one in traced.kept.get_finished_spans())
    assert text
    for secret in ("hghg", text, "ggg", "someone"):
        assert secret not in told
    # What a client calls the model is its own text until it is known to be ours.
    refused, parts = traced.spans(model="my secret prompt")
    assert traced.response.status_code == 404
    assert "secret" not in refused.to_json()
    assert refused.name == "text_completion"
    assert not parts


def test_refusals_and_failures(traced):
    span, parts = traced.spans(n=0)  # what is wrong is known before anything is queued
    assert (span.attributes["http.response.status_code"], parts) == (400, {})
    assert span.attributes["error.type"] == "invalid_value"
    assert span.status.status_code is StatusCode.UNSET  # the client's mistake, not the server's


def test_a_failure_is_an_error():
    model = ToyModel.random(V, 1)
    score = model.score
    model.score = lambda *asked: score(*asked) * torch.nan
    made = Traced(Engine(model, ToyTokenizer(V), drafter="none"))
    model.score, broken = score, model.score
    with made.client:
        model.score = broken
        span, _ = made.spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "numerical_error"


def test_probes_and_counters_make_no_spans(traced):
    traced.kept.clear()
    for path in ("/health", "/ready", "/metrics", "/v1/models", "/"):
        assert traced.client.get(path).status_code == 200
    assert traced.client.get(TEXT).status_code == 405
    assert not traced.kept.get_finished_spans()


# --- collectors ----------------------------------------------------------------------------------


class Collector:
    """A collector on this machine: what came, by OTLP over HTTP."""

    def __init__(self, delay_s: float = 0.0, status: int = 200) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.paths: list[str] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                owner.paths.append(self.path)
                owner.requests.append(ExportTraceServiceRequest.FromString(body))
                owner.released.wait(delay_s)
                self.send_response(status)
                self.end_headers()

            def log_message(self, *args) -> None:
                pass

        self.released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Collector:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *args) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def spans(self):
        return [
            ({a.key: a.value.string_value for a in of.resource.attributes}, span)
            for request in self.requests
            for of in request.resource_spans
            for scope in of.scope_spans
            for span in scope.spans
        ]


def serve_through(tracing, requests=1):
    service = Service(toy(), "toy", tracing=tracing)
    with TestClient(create_app(service)) as client:
        return [client.post(TEXT, json=BODY).status_code for _ in range(requests)]


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
def test_spans_reach_a_collector_when_the_server_ends(path):
    with Collector() as collector:
        tracing = to_collector(collector.url + path, "127.0.0.1", 1)
        assert serve_through(tracing, 2) == [200, 200]
    assert set(collector.paths) == {"/v1/traces"}
    resource, span = collector.spans[0]
    assert resource["service.name"] == "outrider"
    assert len(collector.spans) == 8
    names = [span.name for _, span in collector.spans]
    assert names.count("text_completion toy") == 2
    assert span.start_time_unix_nano > 0


def test_opentelemetrys_own_variables_are_heeded(monkeypatch):
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        serve_through(to_collector(None, "127.0.0.1", 1))
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        serve_through(to_collector(None, "127.0.0.1", 1))
    assert len(collector.spans) == 4
    resource, _ = collector.spans[0]
    assert resource["service.name"] == "mine"
    assert resource["deployment.environment.name"] == "test"


def test_a_collector_that_is_down_hangs_or_refuses_costs_no_request(monkeypatch):
    monkeypatch.setattr(module, "_FLUSH_S", 0.3)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
    assert serve_through(to_collector(f"http://127.0.0.1:{port}", "127.0.0.1", 1), 3) == [200] * 3
    with Collector(delay_s=60) as hangs:
        assert serve_through(to_collector(hangs.url, "127.0.0.1", 1), 3) == [200] * 3
    with Collector(status=400) as refuses:
        assert serve_through(to_collector(refuses.url, "127.0.0.1", 1)) == [200]


def test_the_end_does_not_wait_for_a_collector(monkeypatch):
    monkeypatch.setattr(module, "_FLUSH_S", 0.05)
    released, ended = threading.Event(), threading.Event()

    class Hangs(TracerProvider):
        def shutdown(self):
            released.wait(60)
            ended.set()

    Tracing(Hangs(shutdown_on_exit=False), "127.0.0.1", 1).close()
    assert not ended.is_set()
    released.set()
    assert ended.wait(60)


# --- the command ---------------------------------------------------------------------------------


def test_what_is_asked_of_the_command(monkeypatch):
    from outrider.cli import serve

    def environment(**values):
        for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    def asked(otlp=None, **values):
        environment(**values)
        with socket.socket() as taken:
            made = serve._tracing(otlp, taken)
        if made is not None:
            made.close()
        return made is not None

    where = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    assert not asked()
    assert asked("http://127.0.0.1:9")
    assert asked(**where)
    assert not asked(**where, OTEL_TRACES_EXPORTER="none")
    assert not asked("http://127.0.0.1:9", OTEL_SDK_DISABLED="true")
    environment()
    for wrong in ("127.0.0.1:4317", "grpc://x", "http://"):
        with pytest.raises(UsageError, match="no address of a collector"):
            CliRunner().invoke(serve.app, ["--otlp", wrong, "--port", "0"], catch_exceptions=False)


def test_nothing_is_imported_where_it_is_off():
    import subprocess
    import sys

    code = (
        "import sys, json\n"
        "from outrider import Engine\n"
        "from outrider.serve.app import Service, create_app\n"
        "create_app(Service(Engine.load('toy:vocab=4'), 'toy'))\n"
        "print(json.dumps([n for n in sys.modules if n.startswith('opentelemetry.sdk')]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []

"""OpenTelemetry traces: one span for each request, by the conventions for generative AI.

What was asked and answered is never in them: settings, counts and times alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Thread
from time import time_ns
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import propagate
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

from outrider.core.trace import Trace
from outrider.engine.generation import Output
from outrider.errors import UsageError
from outrider.serve.orders import Order
from outrider.serve.scheduler import Done, Event, Tokens

__all__ = ["RequestSpan", "Tracing", "to_collector"]

_PATH = "/v1/traces"
_FLUSH_S = 3.0
"""What the last spans have to be sent in, when the server ends."""

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}

_SETTINGS = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")
"""Numbers of a request that the conventions have names for, which are these."""

_NANOS = 1_000_000_000


def to_collector(url: str | None, host: str, port: int) -> Tracing:
    """Spans that go to a collector by OTLP over HTTP, in batches, from a thread of their own.

    A collector that does not answer costs spans, never time: those that have no room in the queue
    are dropped. OpenTelemetry's variables say the rest: ``OTEL_SERVICE_NAME``,
    ``OTEL_TRACES_SAMPLER``, ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_BSP_SCHEDULE_DELAY``, ...

    Parameters
    ----------
    url
        The collector's, with or without ``/v1/traces``; ``None``: as the variables say.
    host, port
        Where the server listens.

    Raises
    ------
    UsageError
        When the address is none of HTTP.
    """
    exporter = OTLPSpanExporter(endpoint=None if url is None else _endpoint(url))
    resource = Resource.create()  # of OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "outrider"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider, host, port)


def _endpoint(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"'{url}' is no address of a collector.",
            hint="Example: --otlp http://127.0.0.1:4318; spans are sent by HTTP, not by gRPC.",
        )
    return url if parts.path.endswith(_PATH) else url.rstrip("/") + _PATH


class Tracing:
    """Makes the spans of requests.

    Parameters
    ----------
    provider
        Where they go.
    host, port
        Where the server listens.

    Example
    -------
    >>> tracing = Tracing(TracerProvider(shutdown_on_exit=False), "127.0.0.1", 8000)
    >>> tracing.begin("GET", "/health", {}) is None
    True
    """

    def __init__(self, provider: TracerProvider, host: str, port: int) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("outrider.serve")
        self._server = {"server.address": host, "server.port": port}

    def begin(self, method: str, path: str, headers: Mapping[str, str]) -> RequestSpan | None:
        """The span of one request, under the client's own if it told one; ``None`` where nothing
        is generated.
        """
        operation = _OPERATIONS.get(path)
        if operation is None or method != "POST":
            return None
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "outrider",
            "http.request.method": method,
            "http.route": path,
            **self._server,
        }
        return RequestSpan(self._tracer, operation, attributes, propagate.extract(headers))

    def close(self) -> None:
        """Send what is left, as far as that goes within seconds."""
        # A collector that hangs would hold up the end: its thread is left behind.
        ending = Thread(target=self._provider.shutdown, name="outrider-spans", daemon=True)
        ending.start()
        ending.join(_FLUSH_S)


class RequestSpan:
    """A request on its way: what is known of it when it ends becomes a span.

    Under it, for each output: ``queue`` until its turn comes, ``prefill`` until its first token,
    ``decode`` until its end. The clock of an output is its trace's.
    """

    def __init__(
        self, tracer: Any, operation: str, attributes: dict[str, Any], context: Any
    ) -> None:
        self._tracer = tracer
        self._operation = operation
        self._span = tracer.start_span(
            operation, context=context, kind=SpanKind.SERVER, attributes=attributes
        )
        self._submitted_ns = time_ns()
        self._first_ns: int | None = None
        self._done: dict[int, tuple[int, Done]] = {}

    def accepted(self, model: str, orders: Sequence[Order], stream: bool) -> None:
        """The request is sound and goes into the line."""
        options = orders[0].options
        self._submitted_ns = time_ns()
        self._span.update_name(f"{self._operation} {model}")
        self._set(
            {
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "gen_ai.request.choice.count": len(orders),
                "gen_ai.request.max_tokens": options["max_tokens"],
                "gen_ai.request.seed": options["seed"],
                "gen_ai.request.stream": stream,
                **{f"gen_ai.request.{name}": options.get(name) for name in _SETTINGS},
            }
        )

    def listening(self, tell: Callable[[int, Event], None]) -> Callable[[int, Event], None]:
        """``tell``, with the times of first tokens and ends noted where they come to be.

        A client that reads slowly must not make an output look slow.
        """

        def noted(index: int, event: Event) -> None:
            if isinstance(event, Tokens):
                self._first_ns = self._first_ns or time_ns()
            elif isinstance(event, Done):
                self._done[index] = time_ns(), event
            tell(index, event)

        return noted

    def end(self, request_id: str, status: int, told: Mapping[str, Any]) -> None:
        """The request is over; ``told`` is what its line in the log says."""
        # An output may come to its end yet, in another thread, after its client has gone.
        done = [(index, *self._done[index]) for index in sorted(self._done)]
        outputs = [one.output for _, _, one in done]
        for index, ended_ns, one in done:
            self._output(index, ended_ns, one)
        if self._first_ns is not None:
            self._span.add_event("first_token", timestamp=self._first_ns)
            waited_s = (self._first_ns - self._submitted_ns) / _NANOS
            self._set({"gen_ai.response.time_to_first_chunk": waited_s})
        self._set(
            {
                "http.response.status_code": status,
                "outrider.request_id": request_id,
                "gen_ai.usage.input_tokens": told.get("prompt_tokens"),
                "gen_ai.usage.output_tokens": told.get("completion_tokens"),
                "gen_ai.response.finish_reasons": [o.finish_reason for o in outputs] or None,
                "outrider.drafter": told.get("drafter"),
                "outrider.rule": told.get("rule"),
                "outrider.acceptance_rate": told.get("acceptance_rate"),
                "outrider.tokens_per_target_call": told.get("tokens_per_target_call"),
                "outrider.drafter_failed": any(one.drafter_failed for _, _, one in done) or None,
                "error.type": (told.get("code") or str(status)) if status >= 400 else None,
            }
        )
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def _output(self, index: int, ended_ns: int, done: Done) -> None:
        output, trace = done.output, done.output.trace
        began = ended_ns - int(trace.total_s * _NANOS)
        first = began + int((trace.ttft_s or 0.0) * _NANOS)
        self._child("queue", min(self._submitted_ns, began), began, index, {})
        self._child("prefill", began, first, index, _of_prefill(trace))
        self._child("decode", first, ended_ns, index, _of_decoding(output))

    def _child(
        self, name: str, start_ns: int, end_ns: int, index: int, attributes: dict[str, Any]
    ) -> None:
        span = self._tracer.start_span(
            name,
            context=set_span_in_context(self._span),
            start_time=start_ns,
            attributes={"outrider.output": index, **attributes},
        )
        span.end(end_ns)

    def _set(self, values: Mapping[str, Any]) -> None:
        self._span.set_attributes({k: v for k, v in values.items() if v is not None})


def _of_prefill(trace: Trace) -> dict[str, Any]:
    return {"gen_ai.usage.input_tokens": trace.prompt_tokens, "outrider.prefill_s": trace.prefill_s}


def _of_decoding(output: Output) -> dict[str, Any]:
    told = output.trace.summary()
    names = ("target_calls", "drafted_tokens", "accepted_tokens", "draft_time_ms", "verify_time_ms")
    return {
        "gen_ai.usage.output_tokens": len(output.token_ids),
        **{f"outrider.{name}": told[name] for name in names},
    }

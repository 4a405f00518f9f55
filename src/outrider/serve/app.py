"""The server's paths."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from outrider.engine.engine import Engine
from outrider.registry import RULES
from outrider.serve import page
from outrider.serve.answers import Answer
from outrider.serve.described import (
    ChatAnswer,
    CompletionAnswer,
    Model,
    Models,
    Status,
    answers,
    refusals,
)
from outrider.serve.envelope import Envelope, note
from outrider.serve.limits import Limits
from outrider.serve.logprobs import Words
from outrider.serve.metrics import Metrics
from outrider.serve.orders import Intake, Order
from outrider.serve.refusals import RefusalError, of_error, of_status, of_validation
from outrider.serve.scheduler import Done, Event, Failed, Job, Scheduler, Tokens
from outrider.serve.schema import ChatRequest, CompletionRequest

if TYPE_CHECKING:  # what it needs is an extra
    from outrider.serve.tracing import Tracing

__all__ = ["Service", "create_app"]

_VERSION = version("outrider")

_CLIENT_GONE = 499
"""What logs and counters say of a request whose client did not wait; nobody is told."""

_PATHS = {
    "/": "what there is; for browsers, a page to chat with",
    "/v1/models": "the model",
    "/v1/chat/completions": "answers to messages",
    "/v1/completions": "continuations of texts",
    "/health": "whether the engine runs",
    "/ready": "whether requests are taken",
    "/metrics": "counters for Prometheus",
    "/openapi.json": "all of this, for programs",
}


@dataclass(slots=True)
class Service:
    """All that the paths work with.

    Parameters
    ----------
    engine
        The server's; it is the scheduler's alone once the app has started.
    model_name
        What clients call the target.
    drafter
        The drafter's name that the engine was loaded with.
    limits
        What a client may ask for.
    max_batch, queue, cache_bytes
        As in ``Scheduler``.
    api_key
        Asked for where it is not ``None``.
    hosts
        Names that requests may be addressed to; ``None``: any.
    tracing
        Where the spans of requests are made, if they are.

    Example
    -------
    >>> service = Service(Engine.load("toy:vocab=4"), "toy")
    >>> service.fingerprint == Service(Engine.load("toy:vocab=4"), "toy").fingerprint
    True
    """

    engine: Engine
    model_name: str
    drafter: str = "auto"
    limits: Limits = field(default_factory=Limits)
    max_batch: int = 8
    queue: int = 64
    cache_bytes: int | None = None
    api_key: str | None = None
    hosts: tuple[str, ...] | None = None
    tracing: Tracing | None = None
    metrics: Metrics = field(init=False)
    scheduler: Scheduler = field(init=False)
    intake: Intake = field(init=False)
    words: Words | None = field(init=False)
    fingerprint: str = field(init=False)
    created: int = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.model_name)
        self.scheduler = Scheduler(
            self.engine,
            self.metrics,
            max_batch=self.max_batch,
            queue=self.queue,
            cache_bytes=self.cache_bytes,
        )
        self.intake = Intake(
            self.engine,
            self.model_name,
            self.limits,
            drafter=self.drafter,
            cache_bytes=self.cache_bytes,
        )
        tokenizer = self.engine.tokenizer
        self.words = None if tokenizer is None else Words(tokenizer)
        self.fingerprint = _fingerprint(self.engine)
        self.created = int(time.time())


def _fingerprint(engine: Engine) -> str:
    """Of all that a seed's meaning depends on here: target, precision and versions."""
    target = engine.fingerprint()
    told = [
        engine.model.name if target is None else sorted(target.to_dict().items()),
        str(getattr(engine.model, "device", "cpu")),
        _VERSION,
        torch.__version__,
    ]
    return "fp_" + hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]


def create_app(service: Service) -> FastAPI:
    """The server as an ASGI application; its start and end are the scheduler's."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(service.scheduler.start)
        yield
        await run_in_threadpool(service.scheduler.stop)
        if service.tracing is not None:
            await run_in_threadpool(service.tracing.close)

    app = FastAPI(
        title="Outrider",
        version=_VERSION,
        summary="Exact speculative decoding behind OpenAI's protocol.",
        docs_url=None,  # the page would load its scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.add_middleware(
        Envelope,
        metrics=service.metrics,
        paths=tuple(_PATHS),
        body_bytes=service.limits.body_bytes,
        api_key=service.api_key,
        hosts=service.hosts,
        tracing=service.tracing,
    )

    @app.exception_handler(RefusalError)
    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RefusalError)
        note(request.scope, code=error.code)
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        schema = ChatRequest if "chat" in request.url.path else CompletionRequest
        return await refused(request, of_validation(error.errors(), list(schema.model_fields)))

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        told = {
            404: f"There is nothing at this path; there is {', '.join(_PATHS)}.",
            413: f"The body is larger than {service.limits.body_bytes:,} bytes.",
        }
        answer = of_status(error.status_code, told.get(error.status_code, ""))
        answer.headers.update(error.headers or {})
        return await refused(request, answer)

    @app.get("/")
    async def index(request: Request) -> Response:
        """What there is and what may be asked for; a page where HTML is taken."""
        if page.asks_for_it("/", request.headers):
            return page.answer()
        told = {
            "name": "outrider",
            "version": _VERSION,
            "model": service.model_name,
            "context_tokens": service.engine.model.context_length,
            "drafters": service.intake.drafters,
            "drafter": service.drafter,
            "rules": ("auto", *RULES),
            "limits": asdict(service.limits),
            "paths": _PATHS,
        }
        return JSONResponse(told, headers={"Vary": "Accept"})

    @app.get(page.FOLDER + "{name}", include_in_schema=False)
    async def part_of_page(name: str) -> Response:
        """What the page loads."""
        return page.answer(name)

    probes: dict[int | str, dict[str, Any]] = {200: {"model": Status}, 503: {"model": Status}}

    @app.get("/health", responses=probes)
    async def health() -> Response:
        """Whether the engine's thread runs."""
        fine = service.scheduler.alive
        return JSONResponse({"status": "ok" if fine else "failed"}, 200 if fine else 503)

    @app.get("/ready", responses=probes)
    async def ready() -> Response:
        """Whether new requests are taken."""
        fine = service.scheduler.accepts
        return JSONResponse({"status": "ready" if fine else "stopping"}, 200 if fine else 503)

    @app.get("/metrics", response_class=PlainTextResponse, responses=refusals())
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return PlainTextResponse(
            service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    def described() -> dict[str, Any]:
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.created,
            "owned_by": "outrider",
            "max_model_len": service.engine.model.context_length,
        }

    @app.get("/v1/models", response_model=Models, responses=refusals())
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [described()]}

    @app.get("/v1/models/{name:path}", response_model=Model, responses=refusals(404))
    async def model(name: str) -> dict[str, Any]:
        """The same by name."""
        if name != service.model_name:
            raise RefusalError(
                404,
                f"There is no model '{name}' here; there is '{service.model_name}'.",
                code="model_not_found",
                param="model",
            )
        return described()

    @app.post("/v1/chat/completions", responses=answers(ChatAnswer))
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer messages, whole or as a stream of chunks."""
        return await _complete(service, body, request)

    @app.post("/v1/completions", responses=answers(CompletionAnswer))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts or token ids."""
        return await _complete(service, body, request)

    return app


class _ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


class _Mailbox:
    """Brings events from the scheduler's thread to a request's task."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._letters: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue()

    def tell(self, index: int, event: Event) -> None:
        """From the scheduler's thread."""
        with suppress(RuntimeError):  # the loop may have ended
            self._loop.call_soon_threadsafe(self._letters.put_nowait, (index, event))

    def give_up(self) -> None:
        """From this loop: the client is gone."""
        self._letters.put_nowait(None)

    async def events(self, outputs: int) -> AsyncIterator[tuple[int, Tokens | Done]]:
        """Until each output has ended.

        Raises
        ------
        RefusalError
            When one of them fails.
        _ClientGoneError
            When the client has.
        """
        while outputs:
            letter = await self._letters.get()
            if letter is None:
                raise _ClientGoneError
            index, event = letter
            if isinstance(event, Failed):
                raise of_error(event.error)
            outputs -= isinstance(event, Done)
            yield index, event


async def _complete(
    service: Service, body: ChatRequest | CompletionRequest, request: Request
) -> Response:
    request_id = request.scope["outrider"]["request_id"]
    if body.user is not None:
        note(request.scope, user=body.user)
    orders = await run_in_threadpool(service.intake.orders, body)
    mailbox = _Mailbox()
    tell = mailbox.tell
    if (span := request.scope["outrider"]["span"]) is not None:
        span.accepted(service.model_name, orders, bool(body.stream))
        tell = span.listening(tell)
    job = service.scheduler.submit(orders, tell, request_id)
    watch = asyncio.create_task(_watch(request, service, job, mailbox))
    answer = _answer(service, body, orders, request_id)
    events = mailbox.events(len(orders))
    handed_over = False
    try:
        if body.stream:
            # Errors that come before the first token have a status of their own.
            first = await anext(events)
            usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            chunks = _stream(service, job, watch, answer, first, events, usage, request)
            handed_over = True
            return StreamingResponse(chunks, media_type="text/event-stream")
        async for index, event in events:
            answer.add(index, event)
        _note(request, answer)
        return JSONResponse(answer.whole())
    except _ClientGoneError:
        note(request.scope, status=_CLIENT_GONE)
        return Response(status_code=_CLIENT_GONE)
    finally:
        if not handed_over:
            watch.cancel()
            service.scheduler.cancel(job)


async def _watch(request: Request, service: Service, job: Job, mailbox: _Mailbox) -> None:
    """Free a request's places as soon as its client has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    if not job.gone:
        service.metrics.disconnects.inc()
        service.scheduler.cancel(job)
        mailbox.give_up()


async def _stream(
    service: Service,
    job: Job,
    watch: asyncio.Task[None],
    answer: Answer,
    first: tuple[int, Tokens | Done],
    events: AsyncIterator[tuple[int, Tokens | Done]],
    usage: bool,
    request: Request,
) -> AsyncIterator[str]:
    begun: set[int] = set()

    def chunks(index: int, event: Tokens | Done) -> list[dict[str, Any]]:
        answer.add(index, event)
        told = [] if index in begun else [answer.first_chunk(index)]
        begun.add(index)
        if isinstance(event, Tokens):
            told.append(answer.chunk(index, event))
        else:
            told.append(answer.last_chunk(index, event))
        return [one for one in told if one is not None]

    ended = False
    try:
        for chunk in chunks(*first):
            yield _sse(chunk)
        async for index, event in events:
            for chunk in chunks(index, event):
                yield _sse(chunk)
        if usage:
            yield _sse(answer.usage_chunk())
        ended = True
        yield "data: [DONE]\n\n"
    except _ClientGoneError:
        pass
    except RefusalError as refusal:
        ended = True
        note(request.scope, status=refusal.status, code=refusal.code)
        yield _sse(refusal.body)
    finally:
        # Also when the client hung up and this was broken off at one of the lines above.
        if not ended:
            note(request.scope, status=_CLIENT_GONE)
        _note(request, answer)
        service.scheduler.cancel(job)
        watch.cancel()


def _answer(
    service: Service,
    body: ChatRequest | CompletionRequest,
    orders: list[Order],
    request_id: str,
) -> Answer:
    chat = isinstance(body, ChatRequest)
    n = body.n or 1
    return Answer(
        id=f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        model=service.model_name,
        created=int(time.time()),
        fingerprint=service.fingerprint,
        chat=chat,
        prompt_lengths=[len(order.prompt) for order in orders[::n]],
        n=n,
        words=service.words,
        calls=orders[0].calls,
    )


def _note(request: Request, answer: Answer) -> None:
    summary = answer.summary()
    trace = summary["trace"]
    note(
        request.scope,
        **answer.usage(),
        drafter=summary["drafter"],
        rule=summary["rule"],
        acceptance_rate=trace["acceptance_rate"],
        tokens_per_target_call=trace["tokens_per_target_call"],
    )


def _sse(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"

"""The server on Ray Serve: replicas with an engine each, and a front that answers for them.

A request is sent to one replica. Should that die, the front sends the request again: whatever
chance it takes is fixed by a seed before it is sent, so the second answer is the first one's.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.exceptions import ObjectLostError, RayActorError, RaySystemError, WorkerCrashedError
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from outrider.engine.cluster import Share, environment, use_threads
from outrider.engine.engine import Engine
from outrider.models.memory import free_bytes
from outrider.serve.app import Service, create_app
from outrider.serve.envelope import Envelope
from outrider.serve.limits import Limits
from outrider.serve.logs import log
from outrider.serve.metrics import Metrics
from outrider.serve.refusals import RefusalError, of_status

__all__ = ["APPLICATION", "Asked", "Front", "Plan", "Replica", "Scale", "application", "with_seed"]

APPLICATION = "outrider"
"""The name on the cluster."""

_TRIES = 3
"""How often a request is sent: one that ends each replica it comes to must not end them all."""

_CACHE_SHARE = 0.8
_CHECK_S = 5.0
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_OWN_HEADERS = (b"authorization", b"connection", b"content-length", b"transfer-encoding")
"""What belongs to one hop of a request."""

_LOST = (
    RayActorError, ObjectLostError, RaySystemError, ReplicaUnavailableError, WorkerCrashedError,
)  # fmt: skip


class ReplicaLostError(Exception):
    """A replica whose engine has ended, though its process runs."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What each replica serves.

    Parameters
    ----------
    target, load
        As for ``Engine.load``.
    model_name, drafter, limits, max_batch, queue
        As for ``Service``.
    cache_bytes
        Memory for the caches of one replica; ``None``: four fifths of its share of what is free.
    share
        Processors and GPUs of one replica.
    """

    target: str
    load: dict[str, Any]
    model_name: str
    drafter: str
    limits: Limits
    max_batch: int
    queue: int
    cache_bytes: int | None
    share: Share

    @property
    def places(self) -> int:
        """Requests that one replica takes."""
        return self.max_batch + self.queue


@dataclass(frozen=True, slots=True)
class Scale:
    """How many replicas: ``least`` to ``most``, by how many requests there are."""

    least: int = 1
    most: int = 1


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it goes from the front to a replica."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @property
    def scope(self) -> dict[str, Any]:
        """As ASGI has it."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": self.headers,
            "client": None,
            "server": None,
        }


@dataclass(frozen=True, slots=True)
class Reply:
    """A replica's answer, or the head of one whose body comes in pieces."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""


def with_seed(body: bytes, seed: int) -> tuple[bytes, bool]:
    """A request's body with a seed where it has none, and whether its answer is a stream.

    What cannot be read stays as it is: the replica says what is wrong with it.

    Example
    -------
    >>> with_seed(b'{"prompt": "a", "stream": true}', 7)
    (b'{"prompt": "a", "stream": true, "seed": 7}', True)
    """
    try:
        told = json.loads(body)
    except ValueError:
        return body, False
    if not isinstance(told, dict):
        return body, False
    if told.get("seed") is None:
        body = json.dumps(told | {"seed": seed}).encode()
    return body, told.get("stream") is True


class Replica:
    """One engine behind the server's own paths."""

    async def __init__(self, plan: Plan) -> None:  # type: ignore[misc]  # as Ray has it
        self._service = await asyncio.to_thread(_service, plan)
        self._app = create_app(self._service)
        self._life = self._app.router.lifespan_context(self._app)
        await self._life.__aenter__()

    async def __del__(self) -> None:
        # When the last request that was taken is answered, or its time is over.
        if hasattr(self, "_life"):
            await self._life.__aexit__(None, None, None)

    def check_health(self) -> None:
        """Ray replaces a replica that raises here.

        Raises
        ------
        ReplicaLostError
            When the engine's thread does not run.
        """
        if not self._service.scheduler.alive:
            raise ReplicaLostError(f"The engine has failed: {self._service.scheduler.failure!r}.")

    def metrics(self) -> tuple[str, str]:
        """This replica's name and its counters."""
        return serve.get_replica_context().replica_tag, self._service.metrics.text()

    async def whole(self, asked: Asked) -> Reply:
        """Answer in one piece."""
        self.check_health()
        messages = [message async for message in _run(self._app, asked)]
        self.check_health()  # or the answer may be that the engine has failed
        head = messages[0]
        body = b"".join(message.get("body", b"") for message in messages[1:])
        return Reply(head["status"], list(head["headers"]), body)

    async def pieces(self, asked: Asked) -> AsyncIterator[Reply | bytes]:
        """Answer piece by piece; the head comes first."""
        self.check_health()
        async for message in _run(self._app, asked):
            if message["type"] == "http.response.start":
                yield Reply(message["status"], list(message["headers"]))
            elif message.get("body"):
                yield message["body"]


def _service(plan: Plan) -> Service:
    use_threads(plan.share)
    engine = Engine.load(plan.target, **plan.load)
    device = getattr(engine.model, "device", "cpu")
    # Replicas on one machine share its memory as they share its processors.
    part = 1.0 if plan.share.gpus else min(1.0, plan.share.cpus / (os.cpu_count() or 1))
    return Service(
        engine,
        plan.model_name,
        drafter=plan.drafter,
        limits=plan.limits,
        max_batch=plan.max_batch,
        queue=plan.queue,
        cache_bytes=(
            int(_CACHE_SHARE * part * free_bytes(device))
            if plan.cache_bytes is None
            else plan.cache_bytes
        ),
    )


async def _run(app: Any, asked: Asked) -> AsyncIterator[dict[str, Any]]:
    """Call an ASGI application; its messages."""
    messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    body = [asked.body]

    async def receive() -> dict[str, Any]:
        if body:
            return {"type": "http.request", "body": body.pop(), "more_body": False}
        await asyncio.Event().wait()  # nobody hangs up here: the task is cancelled
        raise AssertionError

    task = asyncio.ensure_future(app(asked.scope, receive, messages.put))
    task.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        while (message := await messages.get()) is not None:
            yield message
        await task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class Front:
    """Takes requests, sends each to a replica, and sends it again if that dies.

    Parameters
    ----------
    replicas
        The handle of all of them.
    limits, api_key, hosts
        As for ``Service``.
    model_name
        What clients call the target.
    places
        Requests that all replicas may have been sent, or wait to be sent.
    """

    def __init__(
        self,
        replicas: DeploymentHandle[Any],
        limits: Limits,
        model_name: str,
        places: int,
        api_key: str | None,
        hosts: tuple[str, ...] | None,
    ) -> None:
        self._replicas = replicas
        self._limits = limits
        self._model_name = model_name
        self._places = places
        self._api_key = api_key
        self._hosts = hosts
        self._running = 0
        self._draining = False

    def __serve_build_asgi_app__(self) -> Envelope:
        app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._metrics),
                Route("/{path:path}", self._relay, methods=_METHODS),
            ]
        )
        return Envelope(
            app,
            metrics=Metrics(self._model_name),
            paths=("/v1/chat/completions", "/v1/completions"),
            body_bytes=self._limits.body_bytes,
            api_key=self._api_key,
            hosts=self._hosts,
        )

    async def drain(self, limit_s: float) -> bool:
        """Take no new requests, and wait until the last one is answered; whether it was in time."""
        self._draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._running:
                    await asyncio.sleep(0.05)
        return not self._running

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        if self._draining:
            return JSONResponse({"status": "stopping"}, 503)
        return JSONResponse({"status": "ready"})

    async def _metrics(self, request: Request) -> Response:
        told = await self._replicas.broadcast("metrics").results_async()
        return Response(merged(told), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _relay(self, request: Request) -> Response:
        if self._draining:
            return RefusalError(
                503, "The server is stopping.", code="not_available", retry_after_s=5
            ).response()
        if self._running >= self._places:
            return RefusalError(
                429,
                f"All {self._places} places are taken.",
                code="queue_full",
                retry_after_s=1,
            ).response()
        self._running += 1
        handed_over = False
        try:
            asked, stream = await _asked(request)
            if not stream:
                reply = await self._whole(asked)
                return _response(reply)
            chunks, head = await self._begun(asked)
            handed_over = True
            return StreamingResponse(self._rest(chunks, asked), head.status, _headers(head.headers))
        except RefusalError as refusal:
            return refusal.response()
        finally:
            self._running -= not handed_over

    async def _whole(self, asked: Asked) -> Reply:
        for _ in range(_TRIES):
            try:
                reply: Reply = await self._replicas.whole.remote(asked)
            except (*_LOST, ReplicaLostError) as error:
                log("replica_lost", level=30, error=error)
                continue
            return reply
        raise _lost()

    async def _begun(self, asked: Asked) -> tuple[Any, Reply]:
        """A stream whose head has come; before that it can be begun again."""
        for _ in range(_TRIES):
            chunks: Any = self._replicas.options(stream=True).pieces.remote(asked)
            try:
                return chunks, await anext(chunks)
            except (*_LOST, ReplicaLostError) as error:
                log("replica_lost", level=30, error=error)
        raise _lost()

    async def _rest(self, chunks: Any, asked: Asked) -> AsyncIterator[bytes]:
        whole = False
        try:
            async for chunk in chunks:
                yield chunk
            whole = True
        except (*_LOST, ReplicaLostError) as error:
            log("replica_lost", level=30, error=error)
            yield f"data: {json.dumps(_lost().body)}\n\n".encode()
        finally:
            self._running -= 1
            if not whole:
                chunks.cancel()  # the client has hung up


async def _asked(request: Request) -> tuple[Asked, bool]:
    try:
        body = await request.body()
    except HTTPException as error:
        raise of_status(error.status_code) from error
    stream = False
    if request.method == "POST":
        body, stream = with_seed(body, secrets.randbits(63))
    headers = [
        (name, value)
        for name, value in request.scope["headers"]
        if name not in (*_OWN_HEADERS, b"x-request-id")
    ]
    request_id = request.scope["outrider"]["request_id"].encode()
    headers += [(b"x-request-id", request_id), (b"content-length", str(len(body)).encode())]
    return Asked(
        request.method, request.scope["path"], request.scope["query_string"], headers, body
    ), stream


def _response(reply: Reply) -> Response:
    return Response(reply.body, reply.status, _headers(reply.headers))


def _headers(given: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Those that the front does not set by itself."""
    own = (*_OWN_HEADERS, b"x-request-id")
    return {n.decode("latin-1"): v.decode("latin-1") for n, v in given if n.lower() not in own}


def _lost() -> RefusalError:
    return RefusalError(
        503,
        f"Replicas died over this request {_TRIES} times.",
        code="replica_lost",
        retry_after_s=5,
    )


def merged(told: Sequence[tuple[str, str]]) -> str:
    """Counters of several replicas in Prometheus' format, each with its replica's name.

    >>> text = "# HELP a b\\n# TYPE a gauge\\na 1.0\\n"
    >>> print(merged([("x", text), ("y", text)]), end="")
    # HELP a b
    # TYPE a gauge
    a{replica="x"} 1.0
    a{replica="y"} 1.0
    """
    families: dict[str, Metric] = {}
    for replica, text in told:
        for family in text_string_to_metric_families(text):
            kept = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            kept.samples += [
                one._replace(labels={**one.labels, "replica": replica}) for one in family.samples
            ]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Told(list(families.values())))
    return generate_latest(registry).decode()


class _Told:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def application(
    plan: Plan,
    scale: Scale,
    *,
    drain_s: float,
    api_key: str | None = None,
    hosts: tuple[str, ...] | None = None,
) -> serve.Application:
    """What ``serve.run`` deploys."""
    replicas = serve.deployment(
        name="replica",
        ray_actor_options={
            "num_cpus": plan.share.cpus,
            "num_gpus": plan.share.gpus,
            "runtime_env": {"env_vars": environment(plan.share)},
        },
        max_ongoing_requests=plan.places,
        max_queued_requests=-1,  # the front counts: what was taken must find room a second time
        graceful_shutdown_timeout_s=drain_s,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=_CHECK_S,
        **_scaling(plan, scale),
    )(Replica)
    front = serve.deployment(
        name="front",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=2 * scale.most * plan.places,
        graceful_shutdown_timeout_s=drain_s,
    )(serve.ingress()(Front))
    places = scale.most * plan.places
    return front.bind(replicas.bind(plan), plan.limits, plan.model_name, places, api_key, hosts)


def _scaling(plan: Plan, scale: Scale) -> dict[str, Any]:
    if scale.least == scale.most:
        return {"num_replicas": scale.most}
    return {
        "autoscaling_config": {
            "min_replicas": scale.least,
            "max_replicas": scale.most,
            "target_ongoing_requests": plan.max_batch,  # a full pass
        }
    }

"""The process: a socket, uvicorn, and an end that lets running requests finish."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from prometheus_client import disable_created_metrics

from outrider.serve.app import Service, create_app
from outrider.serve.logs import log

__all__ = ["run"]

_LAST_WORDS_S = 5
"""For answers that are being sent when the rest has ended."""


def run(
    service: Service, taken: socket.socket, *, drain_s: float, ready: Callable[[], None]
) -> bool:
    """Serve until a signal comes; whether all went well.

    At SIGTERM or SIGINT no new requests are taken, and those that were taken may finish within
    ``drain_s`` seconds; a second signal gives them no more time. ``ready`` is called when requests
    are taken.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a second line for each counter that nobody reads
    config = uvicorn.Config(
        create_app(service),
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=_LAST_WORDS_S,
    )
    server = _Server(config, service, drain_s, ready)
    try:
        server.run(sockets=[taken])
    except SystemExit:  # uvicorn's word for an app that did not start
        return False
    finally:
        taken.close()
    return service.scheduler.failure is None


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, service: Service, drain_s: float, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._service, self._drain_s, self._ready = service, drain_s, ready
        self._signals = 0
        self._deadline: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Nothing that takes a lock: this may interrupt whoever holds it.
        self._signals += 1

    async def on_tick(self, counter: int) -> bool:
        scheduler = self._service.scheduler
        if self._signals and self._deadline is None:
            log("draining", limit_s=self._drain_s)
            self._deadline = time.monotonic() + self._drain_s
            scheduler.drain()
        if self._signals > 1:
            self._deadline = 0.0
        if self._deadline is not None and (
            scheduler.idle or time.monotonic() > self._deadline or not scheduler.alive
        ):
            if not scheduler.idle:
                log("drain_limit_reached")
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # What did not finish is told so, while its connections are still there.
        await asyncio.to_thread(self._service.scheduler.stop)
        await super().shutdown(sockets)
        log("stopped")

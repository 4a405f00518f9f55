"""The command's own process: it joins a cluster, deploys, and waits for a signal to end it all."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Event
from types import FrameType

from ray import serve
from ray.exceptions import RayError

from outrider.engine.cluster import connected, share_of
from outrider.errors import ModelError
from outrider.serve.logs import log
from outrider.serve.ray_app import APPLICATION, Plan, Scale, application

__all__ = ["run"]

_LAST_WORDS_S = 5.0
_PATIENCE, _PATIENCE_S = "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60"
"""Ray gives a process that is to listen five seconds to start, which a busy machine may need for
its imports alone. A cluster that runs already has a patience of its own."""


def run(
    plan: Plan,
    scale: Scale,
    *,
    cluster: str,
    host: str,
    port: int,
    drain_s: float,
    ready: Callable[[], None],
    api_key: str | None = None,
    hosts: tuple[str, ...] | None = None,
    stop: Event | None = None,
) -> None:
    """Serve on a cluster until a signal comes.

    At SIGTERM or SIGINT no new requests are taken, those that were taken may finish within
    ``drain_s`` seconds, and the replicas end; a second signal gives them no more time.

    Parameters
    ----------
    plan
        What is served; its share is set here, by what the cluster has.
    scale
        How many replicas.
    cluster
        As for ``connected``.
    host, port
        Where each machine with a replica listens.
    ready
        Called when requests are taken.
    stop
        Ends the server as a signal does.

    Raises
    ------
    ModelError
        When Ray Serve does not start, or a replica cannot load its model; Ray's logs say why.
    """
    os.environ.setdefault(_PATIENCE, _PATIENCE_S)
    with connected(cluster) as nodes, _signals(stop or Event()) as stopped:
        plan = replace(plan, share=share_of(nodes, scale.most, plan.load.get("device")))
        log("deploying", replicas=scale.most, cpus=plan.share.cpus, gpus=plan.share.gpus)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # the log here is ours, in JSON
        alone = not serve.status().proxies
        try:
            try:
                serve.start(http_options={"host": host, "port": port})
            except RayError as error:
                raise ModelError(
                    f"Ray Serve could not be started: {str(error).splitlines()[0]}",
                    hint=f"On a busy machine more patience may help: {_PATIENCE}=300.",
                ) from error
            app = application(plan, scale, drain_s=drain_s, api_key=api_key, hosts=hosts)
            try:
                front = serve.run(app, name=APPLICATION, route_prefix="/")
            except RuntimeError as error:
                raise ModelError(
                    f"The replicas could not be started: {str(error).splitlines()[0]}",
                    hint="'serve status' and Ray's logs say why.",
                ) from error
            ready()
            while not stopped.wait(0.5):
                pass
            log("draining", limit_s=drain_s)
            with suppress(KeyboardInterrupt):  # a second signal
                _drain(front, drain_s)
        finally:
            if alone:
                serve.shutdown()  # type: ignore[no-untyped-call]
            else:
                serve.delete(APPLICATION)
            log("stopped")


def _drain(front: serve.handle.DeploymentHandle, limit_s: float) -> None:  # type: ignore[type-arg]
    told = front.broadcast("drain", limit_s).results(timeout_s=limit_s + _LAST_WORDS_S)
    if not all(told):
        log("drain_limit_reached")


@contextmanager
def _signals(stop: Event) -> Iterator[Event]:
    """The first signal asks for the end, the second one does not wait for it."""

    def asked(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    words = (signal.SIGINT, signal.SIGTERM)
    try:
        before = [signal.signal(word, asked) for word in words]
    except ValueError:  # not the main thread, which alone may do so
        yield stop
        return
    try:
        yield stop
    finally:
        for word, handler in zip(words, before, strict=True):
            signal.signal(word, handler)

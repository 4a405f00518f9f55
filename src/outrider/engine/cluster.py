"""Work spread over the machines of a Ray cluster. All that the project asks of Ray's core is here.

Each worker is a process with processors of its own: it makes what it needs once, such as an engine
with its weights, and is then called with one job after the other.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from outrider.errors import ModelError, OutriderError, UsageError

__all__ = [
    "Share", "Workers", "connected", "environment", "share_of", "team_of", "use_threads",
    "workers",
]  # fmt: skip

_TRIES = 3
"""How often a job is begun whose worker dies."""

_PATIENCE_S = 5.0

_STORE_BYTES = 200_000_000
"""Of a cluster of this machine: what is sent is token ids."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker has to itself."""

    cpus: int
    gpus: int = 0


def share_of(nodes: Sequence[Mapping[str, float]], count: int, device: str | None = None) -> Share:
    """The largest equal share of a cluster's processors that ``count`` workers can have.

    Parameters
    ----------
    nodes
        What each machine has: ``CPU`` and ``GPU``.
    count
        Workers.
    device
        That they compute on; a GPU each where there are GPUs for all of them, unless it is ``cpu``.

    Raises
    ------
    UsageError
        When there are not so many processors.

    Example
    -------
    >>> share_of([{"CPU": 8}, {"CPU": 4}], 3), share_of([{"CPU": 8, "GPU": 2}], 2)
    (Share(cpus=4, gpus=0), Share(cpus=4, gpus=1))
    """
    gpus = int(device != "cpu" and sum(int(node.get("GPU", 0)) for node in nodes) >= count)
    if device is not None and device.startswith("cuda") and not gpus:
        raise UsageError(
            f"{count} workers need a GPU each; the cluster has "
            f"{sum(int(node.get('GPU', 0)) for node in nodes)}.",
            hint="Ask for fewer of them, or use --device cpu.",
        )

    def places(cpus: int) -> int:
        return sum(
            min(int(node.get("CPU", 0)) // cpus, int(node.get("GPU", 0)) if gpus else count)
            for node in nodes
        )

    most = max((int(node.get("CPU", 0)) for node in nodes), default=0)
    fitting = [cpus for cpus in range(1, most + 1) if places(cpus) >= count]
    if not fitting:
        raise UsageError(
            f"{count} workers need a processor each; the cluster has "
            f"{sum(int(node.get('CPU', 0)) for node in nodes)}.",
            hint="Ask for fewer of them, or add machines to the cluster.",
        )
    return Share(max(fitting), gpus)


def team_of(
    nodes: Sequence[Mapping[str, float]], count: int | None, device: str | None = None
) -> tuple[int, Share]:
    """How many workers, and each one's share: one on each machine, unless a number is given.

    Raises
    ------
    UsageError
        When there are not so many processors.

    Example
    -------
    >>> team_of([{"CPU": 16}, {"CPU": 4}], None), team_of([{"CPU": 16}, {"CPU": 4}], 2)
    ((2, Share(cpus=4, gpus=0)), (2, Share(cpus=8, gpus=0)))
    """
    if count is not None:
        return count, share_of(nodes, count, device)
    smallest = min(nodes, key=lambda node: (int(node.get("GPU", 0) > 0), node["CPU"]), default={})
    return len(nodes), share_of([smallest], 1, device)


def environment(share: Share) -> dict[str, str]:
    """What keeps a worker's libraries to its share; read when they are first imported."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    return dict.fromkeys(names, str(share.cpus))


def use_threads(share: Share) -> None:
    """Compute on as many threads as a share has processors, whatever was set before."""
    import numba
    import torch

    torch.set_num_threads(share.cpus)
    numba.set_num_threads(min(share.cpus, numba.config.NUMBA_NUM_THREADS))


@contextmanager
def connected(address: str = "auto") -> Iterator[list[dict[str, float]]]:
    """Join a cluster for a while; gives what each of its machines has.

    Parameters
    ----------
    address
        ``auto``: the cluster that runs on this machine or that ``RAY_ADDRESS`` names. ``local``:
        one of this machine alone, which ends with the context. Else the address of a head node.

    Raises
    ------
    UsageError
        When Ray is not installed.
    ModelError
        When there is no cluster at the address.
    """
    if find_spec("ray") is None:
        raise UsageError(
            "A cluster needs ray, which is not installed here.", hint="pip install 'outrider[ray]'"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody else is told of a run
    import ray

    joined = ray.is_initialized()  # by who calls, whose it stays
    if not joined:
        own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
        try:
            _check_reachable(address)
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **(own if address == "local" else {}),
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise ModelError(
                f"There is no Ray cluster at '{address}': {str(error).splitlines()[0]}",
                hint="Start one (ray start --head), or use --ray-address local.",
            ) from error
    try:
        found = [dict(node["Resources"]) for node in _nodes() if node["Alive"]]
        yield [node for node in found if node.get("CPU")]  # a head may do nothing but direct
    finally:
        if not joined:
            ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ask for a head node's port first: Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE_S).close()


def _nodes() -> list[dict[str, Any]]:
    import ray

    return list(ray.nodes())  # type: ignore[no-untyped-call]


class Workers:
    """Workers that have made what they need; ``workers`` starts and ends them."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors

    def each(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of what each worker made; the results in their order."""
        import ray

        calls = [actor.call.remote(method, *arguments) for actor in self._actors]
        with _errors():
            return list(ray.get(calls))

    def map(self, method: str, jobs: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        """Call a method with each job's arguments, as workers become free.

        Gives the job's number and its result, in the order in which they come. The job of a
        worker that dies is begun again.
        """
        import ray

        waiting = list(enumerate(jobs))[::-1]
        running: dict[Any, tuple[Any, int]] = {}
        idle = list(self._actors)
        while waiting or running:
            while waiting and idle:
                actor, (number, job) = idle.pop(), waiting.pop()
                running[actor.call.remote(method, *job)] = actor, number
            (done,), _ = ray.wait(list(running), num_returns=1)
            actor, number = running.pop(done)
            idle.append(actor)
            with _errors():
                result = ray.get(done)
            yield number, result


@contextmanager
def workers(make: Callable[[], Any], count: int, share: Share) -> Iterator[Workers]:
    """Start workers in the cluster that was joined, and end them.

    Parameters
    ----------
    make
        Called once in each; what it gives has the methods that are called.
    count, share
        How many, and what each has to itself.

    Raises
    ------
    OutriderError
        What ``make`` raises.
    """
    import ray

    actor: Any = ray.remote(_Worker)
    actor = actor.options(
        num_cpus=share.cpus,
        num_gpus=share.gpus,
        max_restarts=_TRIES - 1,
        max_task_retries=_TRIES - 1,
        scheduling_strategy="SPREAD",
        runtime_env={"env_vars": environment(share)},
    )
    started = [actor.remote(make, share, number) for number in range(count)]
    try:
        made = Workers(started)
        with _errors():
            ray.get([one.ready.remote() for one in started])
        yield made
    finally:
        for one in started:
            with suppress(Exception):  # it may have ended by itself
                ray.kill(one)


class _Worker:
    def __init__(self, make: Callable[[], Any], share: Share, number: int) -> None:
        use_threads(share)
        self._failure: OutriderError | None = None
        try:
            self._made = make()
        except OutriderError as error:  # Ray would tell no more than that the worker died
            self._failure = error
        else:
            self._made.worker = f"{socket.gethostname()}/{number}"

    def ready(self) -> None:
        if self._failure is not None:
            raise self._failure

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._made, method)(*arguments)


@contextmanager
def _errors() -> Iterator[None]:
    """What a worker raised, as if it had been raised here."""
    from ray.exceptions import RayError, RayTaskError

    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, OutriderError):
            raise error.cause from None
        raise
    except RayError as error:
        raise ModelError(
            f"A worker was lost, and not for the first time: {str(error).splitlines()[0]}",
            hint="See Ray's logs (ray logs), and whether each worker has the memory it needs.",
        ) from error

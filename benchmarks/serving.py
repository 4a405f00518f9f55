"""A server for benchmarks: started here for the time of a run, or one that runs already."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import urllib.request
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

__all__ = ["Server", "add_arguments", "chunks", "running"]

_STOP_S = 60


@dataclass(frozen=True)
class Server:
    """Where requests go. ``pid`` is that of a server that was started here."""

    address: str
    model: str
    pid: int | None = None

    def metric(self, name: str) -> float:
        """One of its counters by its whole name; 0 where nothing was counted."""
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=_STOP_S) as told:
            lines = [line.rsplit(" ", 1) for line in told.read().decode().splitlines()]
        return next((float(value) for key, value in lines if key == name), 0.0)


def add_arguments(ap: ArgumentParser) -> None:
    """Which server."""
    ap.add_argument("--url", default="", help="a server that runs already, without a key")
    ap.add_argument("--target", default="smollm2-135m")
    ap.add_argument("--drafter", default="auto")
    ap.add_argument("--max-batch", type=int, default=16)


@contextmanager
def running(args: Namespace) -> Iterator[Server]:
    """The server at ``--url``, or one of this machine's own, ended with SIGTERM."""
    if args.url:
        address = args.url.rstrip("/").removesuffix("/v1")
        with urllib.request.urlopen(f"{address}/v1/models", timeout=_STOP_S) as told:
            yield Server(address, json.load(told)["data"][0]["id"])
        return
    command = [
        *(sys.executable, "-m", "outrider.cli.main", "serve", "--port", "0", "--json"),
        *("--target", args.target, "--drafter", args.drafter),
        *("--max-batch", str(args.max_batch), "--queue", "256"),
    ]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                log.seek(0)
                raise SystemExit(f"The server did not start:\n{log.read()}")
            yield Server(**json.loads(line), pid=process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def chunks(answer: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """A stream's chunks; what failed in mid-stream is raised."""
    async for line in answer.aiter_lines():
        if not line or line == "data: [DONE]":
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            raise RuntimeError(chunk["error"]["message"])
        yield chunk

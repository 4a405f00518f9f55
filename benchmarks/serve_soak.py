"""Many requests of many kinds to one server: does memory grow, is every place free at the end?

    .venv/bin/python -m benchmarks.serve_soak [--url URL | --target T --drafter D] [--requests 1000]
        [--clients 8] [--max-tokens 48] [--growth-mb 64] [--json FILE]

Requests come in turn as a whole answer, a stream, a stream that is dropped at a random token, a
connection that is dropped before anything is read, a bad request, several outputs at once, a long
prompt, and one at temperature 1; the same for the same ``--seed``. The server's resident memory is
sampled as it goes. What fails the run, with exit status 1:

- memory at the end is more than ``--growth-mb`` above what it was after the first quarter (what is
  compiled, measured and pooled comes before that); of a server at ``--url`` memory is not seen;
- a place or a place in the queue that is not free when all is done;
- a probe, one request asked before, at every eighth of the way and after, drafted and plain in
  turn, whose text is ever another;
- an answer with a status that its request should not get.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from typing import Any

import httpx2
import psutil

from benchmarks.conditions import conditions, print_conditions, print_table, write_json
from benchmarks.serving import Server, add_arguments, chunks, running

KINDS = ("whole", "stream", "dropped", "unread", "bad", "several", "long", "sampled")
BAD: tuple[dict[str, Any], ...] = (
    {"n": 0},
    {"max_tokens": 10**9},
    {"temperature": -1},
    {"no_such_parameter": 1},
    {"prompt": []},
    {"stop_token_ids": [-1]},
)


def body_of(kind: str, server: Server, args: argparse.Namespace, chance: random.Random) -> Any:
    """A request of a kind."""
    body = {
        "model": server.model,
        "prompt": args.prompt,
        "max_tokens": args.max_tokens,
        "temperature": 0,
        "seed": chance.randrange(2**32),
        "stream": kind in ("stream", "dropped", "unread"),
    }
    if kind == "bad":
        body |= chance.choice(BAD)
    elif kind == "several":
        body |= {"n": 3}
    elif kind == "long":
        body |= {"prompt": args.prompt * args.long}
    elif kind == "sampled":
        body |= {"temperature": 1.0, "top_p": 0.9, "logprobs": 2}
    return body


async def one(
    client: httpx2.AsyncClient, server: Server, kind: str, body: Any, chance: random.Random
) -> str | None:
    """What is wrong with the answer to one request, if anything."""
    url = f"{server.address}/v1/completions"
    if not body["stream"]:
        answer = await client.post(url, json=body)
        expected = 400 if kind == "bad" else 200
        if answer.status_code != expected:
            return f"{kind}: {answer.status_code} and not {expected}: {answer.text[:200]}"
        return None
    patience = chance.randrange(1, 12)
    async with client.stream("POST", url, json=body) as answer:
        if answer.status_code != 200:
            return f"{kind}: {answer.status_code}"
        if kind != "unread":
            async for _ in chunks(answer):
                patience -= kind == "dropped"
                if not patience:
                    break
    return None


async def probe(client: httpx2.AsyncClient, server: Server, args: argparse.Namespace) -> list[str]:
    """One request's text, drafted and plain."""
    texts = []
    for more in ({}, {"speculation": False}):
        asked = body_of("whole", server, args, random.Random(0)) | {"temperature": 0.8} | more
        answer = await client.post(f"{server.address}/v1/completions", json=asked)
        texts.append(answer.raise_for_status().json()["choices"][0]["text"])
    return texts


async def soak(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """All requests, some side by side, with probes between."""
    chance = random.Random(args.seed)
    process = psutil.Process(server.pid) if server.pid is not None else None
    memory: list[tuple[int, int]] = []
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    async with httpx2.AsyncClient(timeout=args.timeout) as client:
        probes = [await probe(client, server, args)]
        done = 0
        step = max(1, args.requests // 8)
        while done < args.requests:
            some = range(done, min(done + step, args.requests))
            asked = [(KINDS[i % len(KINDS)], random.Random(chance.random())) for i in some]
            gate = asyncio.Semaphore(args.clients)

            async def through(kind: str, own: random.Random, gate=gate) -> str | None:
                async with gate:
                    counts[kind] += 1
                    return await one(client, server, kind, body_of(kind, server, args, own), own)

            found = await asyncio.gather(*(through(*request) for request in asked))
            wrong += [fault for fault in found if fault is not None]
            done += len(some)
            probes.append(await probe(client, server, args))
            if process is not None:
                memory.append((done, process.memory_info().rss))
            print(f"\r{done} of {args.requests}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    left = await asyncio.to_thread(_left, server, args.timeout)
    return {
        "requests": dict(counts),
        "wrong": wrong,
        "probes": len(probes),
        "probe_texts": sorted({text for pair in probes for text in pair}),
        "memory": memory,
        "left": left,
    }


def _left(server: Server, patience_s: float) -> dict[str, float]:
    """Places that are not free, once those whose clients went away have had time to be."""
    end = time.monotonic() + patience_s
    while True:
        held = {name: server.metric(f"outrider_{name}") for name in ("running", "waiting")}
        if not any(held.values()) or time.monotonic() > end:
            return held
        time.sleep(0.1)


def faults(found: dict[str, Any], growth_mb: float) -> list[str]:
    """What fails the run."""
    told = list(found["wrong"])
    if len(found["probe_texts"]) != 1:
        told.append(f"a probe had {len(found['probe_texts'])} different texts")
    told += [f"{name}: {n:.0f} at the end" for name, n in found["left"].items() if n]
    if found["memory"]:
        quarter = found["memory"][(len(found["memory"]) - 1) // 4][1]
        growth = (found["memory"][-1][1] - quarter) / 1e6
        if growth > growth_mb:
            told.append(f"memory grew by {growth:.0f} MB, {growth_mb:.0f} are allowed")
    return told


def main() -> None:
    """Run, tell, and fail where something is wrong."""
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(ap)
    ap.add_argument("--requests", type=int, default=1000)
    ap.add_argument("--clients", type=int, default=8)
    ap.add_argument("--max-tokens", type=int, default=48)
    ap.add_argument("--prompt", default="A list of five colours, and the list again: ")
    ap.add_argument("--long", type=int, default=20, help="times the prompt, for long ones")
    ap.add_argument("--growth-mb", type=float, default=64.0)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--timeout", type=float, default=600.0, help="seconds for one request")
    ap.add_argument("--json", default="")
    args = ap.parse_args()
    with running(args) as server:
        told = conditions(args) | {"model": server.model}
        print_conditions(told)
        found = asyncio.run(soak(server, args))
    wrong = faults(found, args.growth_mb)
    print_table(
        "Resident memory",
        ("requests done", "MB"),
        [(n, f"{b / 1e6:.0f}") for n, b in found["memory"]],
    )
    print(*(wrong or ["nothing is wrong"]), sep="\n")
    write_json(args.json, told, **found, faults=wrong)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

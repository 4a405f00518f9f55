"""What a server does under load: throughput and waiting times, with speculation and without.

    .venv/bin/python -m benchmarks.serve_load [--url URL | --target T --drafter D]
        [--clients 1,4,8,16] [--requests 4] [--max-tokens 64] [--repeats 3]
        [--ways off,fixed,auto] [--temperature 0] [--json FILE]

A server is started on the loopback address, or one that runs is taken. For each number of clients,
each of them sends its requests one after the other, streamed, in three ways: ``off`` (plain
decoding), ``fixed`` (drafts of ``--fixed`` tokens whatever the load) and ``auto`` (as the server
does by itself: drafts shrink where others wait for the same pass). The ways take turns within every
repeat, in another order each time, so that a drift of the machine's speed falls on all.

Throughput is tokens of a turn over its seconds, the median over the repeats; "against off" is the
median over the repeats of what a turn came to beside the turn without drafts of the same repeat,
with an interval of 95 % by resampling. Times are over all
requests of all repeats: to the first token from sending the request, and per token after it, as
the client sees them. The same prompt with the same seed must give the same text in all three ways;
where it does not, that is told and the exit status is 1. The clients run on the same machine and
take their share of it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from itertools import chain, product
from typing import Any

import httpx2

from benchmarks.conditions import conditions, print_conditions, print_table, write_json
from benchmarks.serving import Server, add_arguments, chunks, running
from outrider.lab.stats import bootstrap_median
from tests.e2e.prompts import PROMPTS

WAYS = ("off", "fixed", "auto")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request and what came of it. Seconds as the client sees them."""

    prompt: int
    text: str
    tokens: int
    first_s: float
    total_s: float

    @property
    def per_token_s(self) -> float | None:
        """After the first one; ``None`` where there is no other."""
        return (self.total_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Turn:
    """All requests of some clients in one way, side by side."""

    way: str
    clients: int
    seconds: float
    asked: list[Asked]

    @property
    def tokens_per_s(self) -> float:
        """All clients' together."""
        return sum(one.tokens for one in self.asked) / self.seconds


async def ask(
    client: httpx2.AsyncClient, server: Server, args: argparse.Namespace, way: str, number: int
) -> Asked:
    """One request, streamed."""
    prompt = number % len(PROMPTS)
    body: dict[str, Any] = {
        "model": server.model,
        "messages": [{"role": "user", "content": PROMPTS[prompt]}],
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "seed": number,
        "stream": True,
    }
    if args.raw:
        body |= {"prompt": args.raw, "ignore_eos": True}
        del body["messages"]
    if way != "auto":
        body["speculation"] = False if way == "off" else {"draft_length": args.fixed}
    path = "/v1/completions" if args.raw else "/v1/chat/completions"
    text, tokens, first_s = "", 0, None
    started = time.perf_counter()
    async with client.stream("POST", server.address + path, json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{answer.status_code}: {(await answer.aread()).decode()}")
        async for chunk in chunks(answer):
            for choice in chunk["choices"]:
                told = choice.get("outrider", {}).get("tokens", [])
                if told and first_s is None:
                    first_s = time.perf_counter() - started
                tokens += len(told)
                text += "".join(token["text"] for token in told)
    total_s = time.perf_counter() - started
    return Asked(number, text, tokens, total_s if first_s is None else first_s, total_s)


async def turn(server: Server, args: argparse.Namespace, way: str, clients: int) -> Turn:
    """Every client's requests, one after the other; the clients side by side."""
    limits = httpx2.Limits(max_connections=clients)
    async with httpx2.AsyncClient(timeout=args.timeout, limits=limits) as client:

        async def one(k: int) -> list[Asked]:
            numbers = range(k * args.requests, (k + 1) * args.requests)
            return [await ask(client, server, args, way, number) for number in numbers]

        started = time.perf_counter()
        asked = await asyncio.gather(*(one(k) for k in range(clients)))
        return Turn(way, clients, time.perf_counter() - started, [*chain(*asked)])


def against(turns: list[Turn], clients: int, way: str, base: str) -> dict[str, Any]:
    """A way's throughput by another's, repeat by repeat: median, and its interval."""
    ours, others = (
        [one.tokens_per_s for one in turns if (one.way, one.clients) == (which, clients)]
        for which in (way, base)
    )
    ratios = [a / b for a, b in zip(ours, others, strict=True)]
    interval = bootstrap_median(ratios) if way != base else None
    return {"against_off": statistics.median(ratios), "against_off_interval": interval}


def differences(turns: list[Turn]) -> list[dict[str, Any]]:
    """Requests whose text was not the same in every turn."""
    texts: dict[int, dict[str, str]] = {}
    for one in turns:
        for asked in one.asked:
            texts.setdefault(asked.prompt, {}).setdefault(asked.text, f"{one.way}/{one.clients}")
    return [{"request": n, "first_seen": found} for n, found in texts.items() if len(found) > 1]


def summary(turns: list[Turn], clients: int, way: str) -> dict[str, Any]:
    """One row of the table."""
    mine = [one for one in turns if (one.way, one.clients) == (way, clients)]
    asked = [request for one in mine for request in one.asked]
    per_token = [one.per_token_s for one in asked if one.per_token_s is not None]
    return {
        "clients": clients,
        "speculation": way,
        "tokens_per_s": statistics.median(one.tokens_per_s for one in mine),
        "first_token_p50_ms": 1e3 * _quantile([one.first_s for one in asked], 0.5),
        "first_token_p99_ms": 1e3 * _quantile([one.first_s for one in asked], 0.99),
        "per_token_p50_ms": 1e3 * _quantile(per_token, 0.5),
        "per_token_p99_ms": 1e3 * _quantile(per_token, 0.99),
        "requests": len(asked),
    }


def _quantile(values: list[float], share: float) -> float:
    """The smallest value that so many are not above; of few values a p99 is the largest."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def _ratio(median: float, interval: tuple[float, float] | None) -> str:
    """With its interval."""
    return f"{median:.2f}" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")


def main() -> None:
    """Run all turns and tell."""
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(ap)
    ap.add_argument("--clients", default="1,4,8,16")
    ap.add_argument("--requests", type=int, default=4, help="of each client in a turn")
    ap.add_argument("--repeats", type=int, default=3)
    ap.add_argument("--ways", default=",".join(WAYS), help="which of off, fixed and auto")
    ap.add_argument("--max-tokens", type=int, default=64)
    ap.add_argument("--temperature", type=float, default=0.0)
    ap.add_argument("--fixed", type=int, default=5, help="draft length of the way 'fixed'")
    ap.add_argument("--raw", default="", help="a text to continue, for a target without a template")
    ap.add_argument("--timeout", type=float, default=600.0, help="seconds for one request")
    ap.add_argument("--json", default="")
    args = ap.parse_args()
    counts = [int(part) for part in args.clients.split(",")]
    ways = tuple(args.ways.split(","))
    if unknown := set(ways) - set(WAYS):
        ap.error(f"--ways is of {', '.join(WAYS)}; got {', '.join(sorted(unknown))}")
    turns: list[Turn] = []
    with running(args) as server:
        told = conditions(args) | {"model": server.model}
        print_conditions(told)
        asyncio.run(turn(server, args, "auto", 1))  # what is compiled or measured once
        for repeat, clients in product(range(args.repeats), counts):
            shift = (repeat + counts.index(clients)) % len(ways)
            for way in ways[shift:] + ways[:shift]:
                turns.append(asyncio.run(turn(server, args, way, clients)))
                print(f"\r{len(turns)} turns", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    base = "off" if "off" in ways else ways[0]
    rows = [
        summary(turns, clients, way) | against(turns, clients, way, base)
        for clients, way in product(counts, ways)
    ]
    differ = differences(turns)
    head = ("clients", "speculation", "tokens/s", f"against {base}", "first token p50, p99 (ms)",
            "per token p50, p99 (ms)", "requests")  # fmt: skip
    lines = [
        (
            row["clients"],
            row["speculation"],
            f"{row['tokens_per_s']:.1f}",
            _ratio(row["against_off"], row["against_off_interval"]),
            f"{row['first_token_p50_ms']:.0f}, {row['first_token_p99_ms']:.0f}",
            f"{row['per_token_p50_ms']:.1f}, {row['per_token_p99_ms']:.1f}",
            row["requests"],
        )
        for row in rows
    ]
    print_table(f"{server.model} under load", head, lines)
    print(f"texts that were not the same in all turns: {len(differ)}")
    write_json(args.json, told, rows=rows, differences=differ, turns=[asdict(one) for one in turns])
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()

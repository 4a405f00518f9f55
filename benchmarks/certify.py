"""Audits of the default model with every rule and drafter, as a table.

    python -m benchmarks.certify --json certify.jsonl [--write-docs]
    python -m benchmarks.certify --enumerate --json exact.jsonl [--write-docs]

Each configuration is audited as ``outrider audit --remember`` does it; samples of plain decoding
are drawn once for each temperature and serve all. With ``--enumerate`` no samples are drawn: the
exact law of shorter outputs is walked, as by ``outrider audit --enumerate``. A finished
configuration is appended to the file at once, so a run that was broken off goes on where it
stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.drafts import blurred
from outrider import Engine
from outrider.audit.exact import audit_exact
from outrider.audit.remembered import Remembered
from outrider.audit.sampled import audit_tokens
from outrider.audit.statistics import Stratum, compare
from outrider.core.processors import Sampling
from outrider.drafters.shape import Static
from outrider.engine.prefix import Prefix
from outrider.models.heads.folder import shipped_head
from outrider.protocols import Drafter, TappedModel

TARGET = "smollm2-135m"
PROMPTS = {
    0.5: "Monday is good. Tuesday is good. Wednesday is",
    1.0: "red, green, blue, red, green,",
}
"""At each temperature: they repeat themselves, so that prompt lookup has something to propose."""
RULES = ("rejection", "block", "coupled")
SAMPLES = {0.5: 8000, 1.0: 14000}
"""Outputs of each kind at each temperature: enough to see a bias of 5 % at every position."""
TOP_P = 0.9
TOKENS = 3
PAIRS = 200
"""Outputs compared token by token."""
DOCS = Path(__file__).parent.parent / "docs" / "audits.md"
WALKED, FEW = 3, 3
"""Tokens of the outputs whose exact law is walked, and top-k there: both bound what can come. For
trees at the higher temperature one token fewer."""
OPEN = "The best thing about this town is"
"""A prompt that can go on in many ways, walked beside the others."""
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
BEGIN_EXACT, END_EXACT = "<!-- exact table -->", "<!-- end of exact table -->"


def configurations(
    base: Engine, rules: Sequence[str]
) -> Iterator[tuple[str, str, Drafter | str, int]]:
    """Rule, drafter's name, drafter, draft length."""
    heads = isinstance(base.model, TappedModel) and shipped_head(TARGET)
    for rule in rules:
        trees = rule != "block"  # it judges chains
        yield rule, "ngram", "ngram", 2
        yield rule, "suffix", "suffix", 2
        yield rule, "model", blurred(base), 2
        if trees:
            yield rule, "suffix, tree 6", "suffix#tree=6", 2
            yield rule, "model, tree 3,2", blurred(base, Static((3, 2))), 2
        if heads:
            yield rule, "eagle", "eagle#chain", 2
            yield rule, "suffix+eagle", "suffix:match=3+eagle#chain", 2
        if heads and trees:
            yield rule, "eagle, tree 3,2", "eagle#tree=3,2", 2
            yield rule, "eagle, tree 8", "eagle#tree=8", 2


def draw(engine: Engine, ids: list[int], count: int, seed: int, **request: Any) -> list[list[int]]:
    prefix, outputs = Prefix(), []
    for i in range(count):
        generation = engine.stream(ids, seed=seed + i, prefix=prefix, **request)
        outputs.append(generation.output.token_ids)
        prefix.keep(generation.session)
    return outputs


def audit(
    temperature: float, path: Path, runtime: str, rules: Sequence[str], alpha: float = 1e-3
) -> None:
    done = {(r["temperature"], r["rule"], r["drafter"]) for r in read(path)}
    base = Engine.load(TARGET, drafter="none", runtime=runtime)
    base.model = Remembered(base.model)
    ids = base.encode(PROMPTS[temperature])
    request = {"max_tokens": TOKENS, "temperature": temperature, "top_p": TOP_P}
    samples, plain = SAMPLES[temperature], None
    for rule, name, drafter, length in configurations(base, rules):
        if (temperature, rule, name) in done:
            continue
        engine = Engine(base.model, base.tokenizer, drafter=drafter, rule=rule, draft_length=length)
        row: dict[str, Any] = {"temperature": temperature, "rule": rule, "drafter": name}
        if rule == "coupled":
            tokens = audit_tokens(engine, [ids], PAIRS, seed=1, request=request)
            row |= {"verdict": tokens.verdict, "outputs": tokens.compared}
            row |= {"differences": len(tokens.differences)}
        else:
            if plain is None:
                plain = draw(base, ids, samples, 0, **request)
            ours = draw(engine, ids, samples, 10**6, **request)
            report = compare([Stratum(plain, ours)], alpha=alpha)
            whole = report.comparisons[-1]
            row |= {"verdict": report.verdict, "outputs": samples, "alpha": alpha}
            row |= {"adjusted_p": report.worst.adjusted_p, "tv": whole.tv, "tv_high": whole.tv_high}
            row["smallest_bias"] = max(c.smallest_bias for c in report.comparisons[:TOKENS])
        print(row, flush=True)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def walk(temperature: float, path: Path, runtime: str, rules: Sequence[str]) -> None:
    """Each configuration's exact law."""
    done = {(r["temperature"], r["rule"], r["drafter"]) for r in read(path)}
    base = Engine.load(TARGET, drafter="none", runtime=runtime)
    base.model = Remembered(base.model)
    prompts = [base.encode(text) for text in (PROMPTS[temperature], OPEN)]
    sampling = Sampling(temperature=temperature, top_p=TOP_P, top_k=FEW)
    for rule, name, drafter, length in configurations(base, rules):
        if (temperature, rule, name) in done:
            continue
        engine = Engine(base.model, base.tokenizer, drafter=drafter, rule=rule, draft_length=length)
        tokens = WALKED - (temperature == max(PROMPTS) and "tree" in name)
        report = audit_exact(engine, prompts, max_tokens=tokens, sampling=sampling)
        row = {
            "tokens": tokens,
            "temperature": temperature,
            "rule": rule,
            "drafter": name,
            "verdict": report.verdict,
            "outputs": report.outputs,
            "courses": report.courses,
            "drafted_tokens": report.drafted_tokens,
            "largest_difference": report.largest_difference,
        }
        print(row, flush=True)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def exact_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| temperature | rule | drafter | tokens | outputs | courses of chance | drafted | verdict "
        "| largest difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in _in_order(rows):
        cells = (
            r["temperature"], r["rule"], r["drafter"], r["tokens"], r["outputs"],
            r["courses"], r["drafted_tokens"], r["verdict"], f"{r['largest_difference']:.1e}",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda r: (r["temperature"], RULES.index(r["rule"])))


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| temperature | rule | drafter | outputs a side | verdict | Holm p | bias seen |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in _in_order(rows):
        if r["rule"] == "coupled":
            p, bias = "token by token", f"{r['differences']} differences"
        else:
            p, bias = f"{r['adjusted_p']:.2g}", f"{r['smallest_bias']:.1%}"
        cells = (r["temperature"], r["rule"], r["drafter"], r["outputs"], r["verdict"], p, bias)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("certify.jsonl"))
    parser.add_argument("--temperature", type=float, choices=list(PROMPTS), action="append")
    parser.add_argument("--rule", choices=RULES, action="append", help="of all by default")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--enumerate", action="store_true", help="walk exact laws instead")
    parser.add_argument("--write-docs", action="store_true", help=f"the table goes into {DOCS}")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    for temperature in arguments.temperature or PROMPTS:
        run = walk if arguments.enumerate else audit
        run(temperature, arguments.json, arguments.runtime, arguments.rule or RULES)
    if arguments.write_docs:
        begin, end = (BEGIN_EXACT, END_EXACT) if arguments.enumerate else (BEGIN, END)
        written = (exact_table if arguments.enumerate else table)(read(arguments.json))
        text = DOCS.read_text()
        head, rest = text.split(begin)[0], text.split(end)[1]
        DOCS.write_text(f"{head}{begin}\n{written}\n{end}{rest}")


if __name__ == "__main__":
    main()

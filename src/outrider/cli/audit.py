"""``outrider audit``: does the output have the law of the target alone?"""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options as o
from outrider.errors import PromptError, UsageError

if TYPE_CHECKING:
    from outrider.audit.exact import ExactReport
    from outrider.audit.sampled import TokenReport
    from outrider.audit.statistics import Bin, Report
    from outrider.cli.screen import Screen

app = typer.Typer()

_PROMPT = "The best thing about this town is"
_TOY_PROMPT = "aaa"  # letters that every toy has
_EXIT = {"consistent": 0, "different": 1, "not exact by design": 1, "not enough samples": 3}


@app.command()
def audit(
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="A text to continue, may be repeated; one is built in."),
    ] = None,
    target: o.TargetName = "smollm2-135m",
    drafter: o.DrafterName = "auto",
    rule: o.RuleName = "auto",
    draft_length: o.DraftLength = "auto",
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="Outputs of each kind for each prompt.")
    ] = 1000,
    max_tokens: o.MaxTokens = 3,
    temperature: o.Temperature = 1.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    presence_penalty: o.PresencePenalty = 0.0,
    frequency_penalty: o.FrequencyPenalty = 0.0,
    logit_bias: o.LogitBias = None,
    min_tokens: o.MinTokens = 0,
    stop_token_id: o.StopTokenId = None,
    alpha: Annotated[
        float, typer.Option("--alpha", help="Probability of a false alarm, over all tests.")
    ] = 1e-3,
    sampled: Annotated[
        bool, typer.Option("--sampled", help="Draw samples from a toy too, not its exact law.")
    ] = False,
    seed: o.Seed = None,
    runtime: o.Runtime = "auto",
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    as_json: o.AsJson = False,
) -> None:
    """Check that a configuration's outputs have the law of plain decoding.

    A toy target's law is walked exactly. A real one is sampled both ways and the samples are
    tested; under the coupled and greedy rules the outputs are compared token by token.

    Exit codes: 0 consistent, 1 different or not exact by design, 3 not enough samples.
    """
    from outrider.cli.generate import check_request
    from outrider.cli.screen import Screen, load_engine
    from outrider.core.processors import Sampling

    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": o.parse_logit_bias(logit_bias),
        "min_tokens": min_tokens,
    }
    request = {**sampling, "max_tokens": max_tokens, "stop_token_ids": stop_token_id or ()}
    length = o.parse_draft_length(draft_length)
    # What is wrong is told before a model is loaded for it.
    check_request(request)
    if not 0 < alpha < 1:
        raise UsageError(f"--alpha must be between 0 and 1; got {alpha}.")
    if any(not text for text in prompt or ()):
        raise PromptError("A prompt is empty.", hint="Say what to generate from.")
    import outrider.audit.statistics  # noqa: F401, tells a missing scipy

    screen = Screen()
    engine = load_engine(
        screen,
        target,
        drafter=drafter,
        rule=rule,
        draft_length=length,
        runtime=runtime,
        dtype=dtype,
        device=device,
    )
    values = Sampling(**sampling)
    chosen = engine.make_rule(values)
    toy = target.partition(":")[0] == "toy"
    texts = prompt or [_TOY_PROMPT if toy else _PROMPT]
    seed = secrets.randbits(62) if seed is None else seed
    result: dict[str, Any] = {
        "target": target,
        "drafter": engine.drafter.name,
        "rule": chosen.name,
        "prompts": texts,
        "samples": samples,
        "max_tokens": max_tokens,
        "sampling": values.to_dict(),
        "seed": seed,
    }
    report: ExactReport | Report | TokenReport
    if not chosen.exact:
        result |= {"method": "none", "verdict": "not exact by design"}
        sentence = (
            f"Not exact by design: the rule '{chosen.name}' does not keep the target's law, so it "
            "is never certified; nothing was drawn."
        )
    else:
        prompts = [engine.encode(text) for text in texts]
        if toy and not sampled:
            report, sentence = _exact(engine, prompts, values, request)
        else:
            report, sentence = _samples(
                screen, engine, prompts, samples, seed, request, alpha, chosen.name
            )
        result |= report.to_dict()
    result["sentence"] = sentence
    if as_json:
        typer.echo(json.dumps(result, ensure_ascii=False))
    else:
        if result["method"] == "samples":
            _table(screen, result)
        screen.out.print(sentence, markup=False)
    raise typer.Exit(_EXIT[result["verdict"]])


def _exact(
    engine: Any, prompts: list[list[int]], values: Any, request: dict[str, Any]
) -> tuple[ExactReport, str]:
    from outrider.audit.exact import TOLERANCE, audit_exact

    report = audit_exact(
        engine,
        prompts,
        max_tokens=request["max_tokens"],
        sampling=values,
        stop_token_ids=request["stop_token_ids"],
    )
    if report.broken:
        return report, f"Different: {report.broken} Outputs then depend on each other's chance."
    walked = (
        f"all {report.courses} courses of chance were walked, over {report.outputs} outputs of "
        f"at most {request['max_tokens']} tokens; the largest difference of a probability is "
        f"{report.largest_difference:.2g} ({TOLERANCE:g} is rounding)"
    )
    unseen = "Other models, longer outputs and the seeded noise itself were not tested."
    if report.verdict == "consistent":
        return report, f"Consistent: {walked}. {unseen}"
    assert report.worst
    _, tokens, plain, ours = report.worst
    return report, (
        f"Different: {walked}, for tokens {list(tokens)}: {plain:.6g} in plain decoding, "
        f"{ours:.6g} here."
    )


def _samples(
    screen: Screen,
    engine: Any,
    prompts: list[list[int]],
    samples: int,
    seed: int,
    request: dict[str, Any],
    alpha: float,
    rule: str,
) -> tuple[Report | TokenReport, str]:
    from rich.progress import Progress

    from outrider.audit.sampled import audit_samples, audit_tokens, equal_tokens_promised

    with Progress(console=screen.err, transient=True, disable=not screen.err.is_terminal) as bar:
        task = bar.add_task("drawing")

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        if equal_tokens_promised(rule):
            tokens = audit_tokens(
                engine, prompts, samples, seed=seed, request=request, advance=advance
            )
            return tokens, _say_tokens(tokens)
        report = audit_samples(
            engine, prompts, samples, seed=seed, request=request, alpha=alpha, advance=advance
        )
    return report, _say_samples(report)


def _say_tokens(report: TokenReport) -> str:
    ties = sum(d.near_tie for d in report.differences)
    told = f"{report.compared} outputs ({report.compared_tokens} tokens) were compared"
    but = f", {ties} of which part at a near-tie of {report.threshold:g} logits" if ties else ""
    if report.verdict == "different":
        d = next(d for d in report.differences if not d.near_tie)
        return (
            f"Different: {told}; with seed {d.seed}, token {d.position + 1} of the output to "
            f"prompt {d.prompt + 1} is {d.token} for {d.plain_token}, and the gap of the two best "
            f"plain logits there, {d.top_2_gap:.3g}, makes it no near-tie."
        )
    if report.verdict == "not enough samples":
        return (
            f"Not enough samples: {told}{but}, all else equal; {report.needed} are needed to see "
            "a fault that touches one output in twenty."
        )
    return (
        f"Consistent: {told} with plain decoding on the same seeds{but}; all else is equal. "
        "Other prompts and longer outputs were not tested."
    )


def _say_samples(report: Report) -> str:
    tested = (
        f"{len(report.comparisons)} laws of {report.plain_samples} plain and "
        f"{report.speculative_samples} speculative outputs were tested (false alarms "
        f"{report.alpha:g})"
    )
    worst = report.worst
    if report.verdict == "different":
        p = min(worst.chi_square_p, worst.g_p)
        odds = "; ".join(_odds(bin_) for bin_ in worst.at_odds[:3])
        return (
            f"Different: {tested}; at {worst.name}, equal laws would be this far apart with "
            f"probability {p:.2g} ({worst.adjusted_p:.2g} after correction). Most at odds: {odds}."
        )
    unseen = max(c.smallest_bias for c in report.comparisons if c.name.startswith("position "))
    if report.verdict == "not enough samples":
        return (
            f"Not enough samples: {tested} and no difference was found, but a bias below "
            f"{unseen:.1%} could have gone unseen; about {report.needed} of each kind are needed "
            "to see one of 5 % at every position."
        )
    return (
        f"Consistent: {tested} and no difference was found; at some position a bias below "
        f"{unseen:.1%} could not be seen, and other prompts and longer outputs were not tested."
    )


def _odds(bin_: Bin) -> str:
    what = "the rare ones" if bin_.token_ids is None else f"tokens {list(bin_.token_ids)}"
    return f"{what} {bin_.plain_frequency:.4f} plain, {bin_.speculative_frequency:.4f} here"


def _table(screen: Screen, report: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("law", "bins", "chi-square p", "G p", "Holm p", "TV, 95 %", "sees 5 %"):
        table.add_column(column, justify="left" if column == "law" else "right", no_wrap=True)
    for c in report["comparisons"]:
        table.add_row(
            c["name"],
            str(c["bins"]),
            f"{c['chi_square_p']:.2g}",
            f"{c['g_p']:.2g}",
            f"{c['adjusted_p']:.2g}",
            f"{c['tv_low']:.3f} to {c['tv_high']:.3f}",
            f"{c['powers'][-1]['probability']:.0%}",
        )
    screen.out.print(table)

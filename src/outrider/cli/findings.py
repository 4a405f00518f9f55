"""What an audit found, in a sentence that says what was tested and what was not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outrider.audit.exact import TOLERANCE, ExactReport
from outrider.audit.sampled import TokenReport
from outrider.audit.statistics import Bin, Report

if TYPE_CHECKING:
    from outrider.audit.endpoints import EndpointReport
    from outrider.cli.screen import Screen

__all__ = ["say_endpoints", "say_exact", "say_samples", "say_tokens", "table"]

_TOLD, _CUT = 3, 60  # prompts that a sentence quotes, and characters of each


def say_exact(report: ExactReport, max_tokens: int, prompts: Sequence[str] = ()) -> str:
    """Of an enumeration; ``prompts`` are their texts, told where the target is a real one."""
    if report.broken:
        return f"Different: {report.broken} Outputs then depend on each other's chance."
    where = f" of '{report.target}' after {_quoted(prompts)}" if report.remembered else ""
    walked = (
        f"all {report.courses} courses of chance were walked, {_drafted(report)}, over "
        f"{report.outputs} outputs of at most {max_tokens} tokens{where}; the largest "
        f"difference of a probability is {report.largest_difference:.2g} ({TOLERANCE:g} is "
        "rounding)"
    )
    if report.verdict == "consistent":
        unseen = "Other models, longer outputs and the seeded noise itself were not tested."
        if report.remembered:
            unseen = (
                "Each context was scored once and remembered, so the target's own cache was not "
                "tested, and neither were other prompts, sampling values, longer outputs and the "
                "seeded noise itself."
            )
        return f"Consistent: {walked}. {unseen}"
    assert report.worst
    _, tokens, plain, ours = report.worst
    return (
        f"Different: {walked}, for tokens {list(tokens)}: {plain:.6g} in plain decoding, "
        f"{ours:.6g} here."
    )


def _quoted(prompts: Sequence[str]) -> str:
    """The first few prompts, cut where they are long."""
    shown = [repr(p if len(p) <= _CUT else p[:_CUT] + "…") for p in prompts[:_TOLD]]
    more = len(prompts) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _drafted(report: Any) -> str:
    return f"with {report.drafted_tokens} drafted tokens"


def say_tokens(report: TokenReport) -> str:
    """Of a comparison token by token."""
    ties = sum(d.near_tie for d in report.differences)
    told = (
        f"{report.compared} outputs ({report.compared_tokens} tokens), {_drafted(report)}, were "
        "compared"
    )
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
        f"Consistent: {told} with plain decoding on the same seeds{but}; "
        f"{'all else is' if ties else 'all are'} equal. Not tested: other prompts, longer outputs, "
        "and the law of plain decoding itself: noise that is wrong on both sides is equal on both."
    )


def say_samples(report: Report, names: Mapping[int, str] | None = None) -> str:
    """Of two samples; ``names`` are texts of token ids."""
    looks = f", look {len(report.looks)}" if len(report.looks) > 1 else ""
    tested = (
        f"{len(report.comparisons)} laws of {report.plain_samples} plain and "
        f"{report.speculative_samples} speculative outputs"
        f"{f', {_drafted(report)},' if report.drafted_tokens is not None else ''} were tested "
        f"(false alarms {report.alpha:g}{looks})"
    )
    worst = report.worst
    if report.verdict == "different":
        p = min(worst.chi_square_p, worst.g_p)
        odds = "; ".join(_odds(bin_, names) for bin_ in worst.at_odds[:3])
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


def say_endpoints(report: EndpointReport) -> str:
    """Of two servers."""
    asked = (
        f"{report.requests} requests were sent ({report.retries} of them again) and "
        f"{report.resumed} answers taken from the log; outputs are compared by {report.symbols}"
    )
    logprobs = report.logprobs
    told = "".join(f" {sentence}" for sentence in logprobs.told)
    if logprobs.largest:
        told += (
            f" {logprobs.compared} reported logprobs differ by at most "
            f"{logprobs.largest.difference:.3g} ({logprobs.tolerance:g} is allowed)."
        )
    if report.statistics:
        said = say_samples(report.statistics, report.names)
        if report.verdict != report.statistics.verdict:
            said = f"{report.verdict.capitalize()}: the reported logprobs are. Of outputs: {said}"
        return f"{said} {asked[0].upper()}{asked[1:]}.{told}"
    parted = f"{len(report.differences)} of {report.compared} answers part"
    return f"{report.verdict.capitalize()}: {parted}; {asked}.{told}"


def _odds(bin_: Bin, names: Mapping[int, str] | None) -> str:
    what = "the rare ones"
    if bin_.token_ids is not None:
        shown = [names.get(token, token) for token in bin_.token_ids] if names else bin_.token_ids
        what = f"tokens {list(shown)}"
    return f"{what} {bin_.plain_frequency:.4f} plain, {bin_.speculative_frequency:.4f} here"


def table(screen: Screen, report: Mapping[str, Any]) -> None:
    """Every test of a report, on the screen."""
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

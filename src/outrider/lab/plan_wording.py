"""A plan in words: what to do, why a longer draft is not better, and what the rest rests on."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.core.theory import speedup_of_request
from outrider.lab.plan import Plan, survival

__all__ = ["WHY", "assumptions", "headline", "sentences"]

WHY = (
    "it counts every drafted token as kept with probability α, as if no earlier one had been "
    "rejected; a rejected token ends the run, so the i-th is kept with probability α^i"
)
"""Why the quoted form is too high."""

_HARDLY = 0.1


def headline(plan: Plan) -> str:
    """What to do, in a line.

    >>> from outrider.lab.plan import Acceptance, make_plan
    >>> headline(make_plan(Acceptance(0.8), 1 / 8))
    "Draft 5 tokens: 2.27 times plain decoding's speed"
    >>> headline(make_plan(Acceptance(0.1), 1 / 2))
    'Do not draft: plain decoding is the fastest'
    """
    best = plan.best
    if not best.draft_length:
        return "Do not draft: plain decoding is the fastest"
    count = f"{best.draft_length} token{'s' if best.draft_length > 1 else ''}"
    return f"Draft {count}: {best.speedup:.2f} times plain decoding's speed"


def sentences(plan: Plan) -> list[str]:
    """What there is to say about it, the most important first."""
    return list(_sentences(plan))


def _sentences(plan: Plan) -> Iterator[str]:
    yield _tokens(plan)
    yield from _quoted(plan)
    yield from _longer(plan)
    yield _threshold(plan)
    if plan.decode_share is not None:
        whole = speedup_of_request(plan.best.speedup, plan.decode_share)
        rest = 1 - plan.decode_share
        yield (
            f"Of a request that spends {plan.decode_share:.0%} of its time decoding, this makes "
            f"{whole:.2f} times the speed"
            + (f"; {1 / rest:.3g} is the most that any draft could." if rest >= 0.005 else ".")
        )
    yield from _batches(plan)
    if plan.measured is not None:
        m = plan.measured
        yield (
            f"Measured on {m.prompts} prompt{'s' if m.prompts > 1 else ''} with {m.draft_length} "
            f"drafted: {m.tokens_per_target_call:.2f} tokens a call, and "
            f"{m.decode_speedup:.2f} times plain decoding's speed where "
            f"{plan.points[m.draft_length].speedup:.2f} was expected; {m.request_speedup:.2f} of "
            "whole requests."
        )


def _tokens(plan: Plan) -> str:
    best, alpha = plan.best, plan.drafting.acceptance.alpha
    if best.draft_length:
        return (
            f"A pass of the target then gives {best.tokens_per_target_call:.2f} tokens in place of "
            f"1, and a round takes {best.draft + best.verify:.2f} plain passes: "
            f"{best.draft:.2f} for drafting and {best.verify:.2f} for verifying."
        )
    one = plan.points[1]
    return (
        f"Even one drafted token takes {one.draft + one.verify - 1:.2f} plain passes and gives "
        f"{one.tokens_per_target_call - 1:.2f} tokens at α = {alpha:.2f}."
    )


def _quoted(plan: Plan) -> Iterator[str]:
    at = plan.points[plan.chosen or min(4, len(plan.points) - 1)]
    if at.quoted is None or at.draft_length < 2 or plan.drafting.acceptance.rates:
        return
    yield (
        f"The often-quoted (1 + γα)/(1 + γ/s) says {at.quoted:.2f} at γ = {at.draft_length}; "
        f"{at.speedup:.2f} is expected. It overstates, because {WHY}."
    )


def _longer(plan: Plan) -> Iterator[str]:
    at, far, alpha = plan.points[plan.chosen], plan.longest, plan.drafting.acceptance.alpha
    if not 0 < at.draft_length < far.draft_length:
        return
    times = far.draft_length / at.draft_length
    last = survival(plan.drafting.acceptance, far.draft_length)[-1]
    late = ", since late tokens hardly ever stand" if last < _HARDLY else ""
    bound = "" if alpha == 1 or plan.drafting.acceptance.rates else (
        f" (no length gives more than 1/(1 − α) = {1 / (1 - alpha):.2f})"
    )  # fmt: skip
    yield (
        f"A draft of {far.draft_length}, {times:.3g} times as long as {at.draft_length}, gives "
        f"{far.speedup:.2f}, not {times:.3g} · {at.speedup:.2f} = {times * at.speedup:.2f}: a pass "
        f"gives {far.tokens_per_target_call:.2f} tokens in place of "
        f"{at.tokens_per_target_call:.2f}{bound}{late}, and each "
        f"round takes {far.draft + far.verify:.2f} passes in place of {at.draft + at.verify:.2f}."
    )


def _threshold(plan: Plan) -> str:
    one = plan.points[1]
    least = one.draft + one.verify - 1
    if least >= 1:
        return "On these costs no draft pays, however often it stands."
    return f"One drafted token pays from an acceptance of {least:.3g} on."


def _batches(plan: Plan) -> Iterator[str]:
    if plan.balance_rows is not None:
        yield (
            f"From about {plan.balance_rows:.0f} rows on, a pass is bound by arithmetic, and each "
            "further row costs."
        )
    if len(plan.batches) > 1:
        last, kept = plan.batches[-1], plan.best.draft_length
        told = "plain decoding is the fastest"
        if last.draft_length:
            told = f"a draft of {last.draft_length} gives {last.speedup:.2f}"
        if kept != last.draft_length:
            told += f"; a draft of {kept} would give {last.speedup_kept:.2f}"
        yield f"With {last.sequences} sequences side by side {told}."


def assumptions(plan: Plan) -> list[str]:
    """What the figures rest on, and what they leave out."""
    acceptance, told = plan.drafting.acceptance, []
    if acceptance.rates:
        told.append(
            "Acceptance is the one measured at each depth; a round without a proposal so deep "
            "counts as one in which nothing stood."
        )
    else:
        told.append(
            "Each drafted token stands with the same probability α, given that all before it did. "
            "Real drafts are better at some places than at others."
        )
    if plan.drafting.price is None:
        told.append(
            "Verifying is taken to cost one plain pass, whatever the number of rows (--verify-cost "
            "says otherwise)."
        )
    price = plan.drafting.price
    if plan.balance_rows is not None:
        told.append(
            "Batches: a pass takes as long as reading weights and caches, or as its arithmetic, "
            "whichever is longer; attention's sums and all overheads are left out."
        )
    elif plan.batches and price is not None:
        told.append(
            f"Batches: rows of other sequences cost what rows of one do; beyond {price.rows[-1]} "
            "rows the cost goes on in a straight line."
        )
    told.append(
        "Judging, sampling and the rest of a round are left out, as they are of plain decoding."
        if plan.measured is None
        else "Times are medians of a few passes and rounds on this machine, as it was."
    )
    return told

"""In words: labels of outputs, what an audit claims, what it tested and what it could not see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.report.svg import columns

__all__ = [
    "HEADLINES",
    "claims",
    "further",
    "label",
    "number",
    "percent",
    "sides",
    "tested",
    "unseen",
    "visible",
]

Result = Mapping[str, Any]

HEADLINES = {
    "consistent": ("Consistent", "=", "faster"),
    "different": ("Different", "≠", "slower"),
    "not enough samples": ("Not enough samples", "?", "unclear"),
    "nothing tested": ("Nothing tested", "∅", "unclear"),
    "not exact by design": ("Not exact by design", "≁", ""),
}
"""For each verdict its headline, its sign and its tone."""

_ENDED = -1  # stands for a position that the output did not reach
_LABEL = 20  # columns
_NEUTRAL = {
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "min_tokens": 0,
}
# Keys of a result that the page shows in a place of their own.
_SHOWN = frozenset(
    (
        *("target", "drafter", "rule", "prompts", "samples", "max_tokens", "sampling", "seed"),
        *("method", "verdict", "sentence", "endpoint", "against", "names"),
        *("largest_difference", "total_variation", "tolerance", "courses", "outputs"),
        *("worst", "broken", "laws", "alpha", "plain_samples", "speculative_samples", "needed"),
        *("comparisons", "looks", "compared", "compared_tokens", "threshold", "differences"),
    )
)


def percent(value: float) -> str:
    """A share in per cent, with three digits.

    >>> percent(0.05), percent(0.123456)
    ('5\\xa0%', '12.3\\xa0%')
    """
    return f"{100 * value:.3g}\N{NO-BREAK SPACE}%"


def number(value: Any) -> str:
    """A number with few digits, a missing one as a dash.

    >>> number(0.0123456), number(1234567), number(None)
    ('0.0123', '1234567', '–')
    """
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def visible(text: str, *, keep: str = "") -> str:
    """A text with what cannot be seen spelt out; characters in ``keep`` stay.

    Signs that turn the direction of writing are spelt out too: a token may not rearrange a page.

    >>> visible("a\\n\\u202eb")
    'a\\\\n\\\\u202eb'
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def _shorten(text: str, limit: int) -> str:
    if columns(text) <= limit:
        return text
    while columns(text) > limit - 1:
        text = text[:-1]
    return text + "…"


def label(token_ids: Sequence[int] | None, texts: Mapping[int, str], limit: int = _LABEL) -> str:
    """An output as a short label: its tokens' texts, or their ids where there are none.

    Long tokens are cut first, so that outputs that differ in a later one still look different.

    >>> label([5, 6, -1], {5: " a", 6: "\\n"})
    '␣a·\\\\n·⟨end⟩'
    >>> label([5, 5, 6], {5: "0123456789", 6: "b"})
    '0123456…·0123456…·b'
    >>> label(None, {}), label([7], {})
    ('all rarer ones', '#7')
    """
    if token_ids is None:
        return "all rarer ones"
    shown = [
        "⟨end⟩"
        if token == _ENDED
        else visible(texts[token]).replace(" ", "␣") or "⟨empty⟩"
        if token in texts
        else f"#{token}"
        for token in token_ids
    ]
    for each in range(limit, 2, -1):
        joined = "·".join(_shorten(text, each) for text in shown)
        if columns(joined) <= limit:
            break
    return _shorten(joined, limit) or "⟨empty⟩"


def sides(result: Result) -> tuple[str, str]:
    """What the two sides are called."""
    if result["method"] == "endpoints":
        return "reference", "under test"
    return "plain decoding", "this configuration"


def _plural(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _sampling(values: Mapping[str, Any]) -> str:
    told = [
        f"{name.replace('_', ' ')} {value}"
        for name, value in values.items()
        if value not in (None, {}, []) and (name not in _NEUTRAL or value != _NEUTRAL[name])
    ]
    return ", ".join(told) + ("; all else neutral" if len(told) < len(values) else "")


def claims(result: Result) -> list[tuple[str, str]]:
    """What is claimed, as terms and what they are here."""
    if result["method"] == "endpoints":
        rows = [("Under test", result.get("endpoint", "–")), ("Reference", result.get("against"))]
    else:
        rows = [
            ("Target", result["target"]),
            ("Drafter", result["drafter"]),
            ("Rule", result["rule"]),
        ]
        if "draft_length" in result:
            rows.append(("Draft length", result["draft_length"]))
            runtime, precision = result["runtime"], result["precision"]
            rows.append(("Runtime", f"{runtime}, {precision}" if precision else runtime))
    rows.append(("Sampling", _sampling(result.get("sampling") or {}) or "as the other side's"))
    rows.append(("Output", f"at most {_plural(result['max_tokens'], 'token')}"))
    by = ("by plain decoding", "by this configuration")
    if result["method"] == "endpoints":
        by = ("of the reference", "under test")
    told = f"{result.get('plain_samples')} {by[0]}, {result.get('speculative_samples')} {by[1]}"
    if not result.get("comparisons"):  # answers at temperature 0, compared one by one
        told = _plural(result.get("compared", 0), "answer") + " of each"
    drawn = {
        "enumeration": "none: every course of chance was walked",
        "tokens": f"{_plural(result.get('compared', 0), 'output')}, each drawn both ways on one "
        "seed",
        "none": "none",
    }.get(
        result["method"],
        told,
    )
    rows.append(("Samples", drawn))
    if result["method"] not in ("enumeration", "none"):
        rows.append(("Seed", result.get("seed", "–")))
    if "alpha" in result:
        rows.append(("False alarms", f"probability {result['alpha']:g}, over all tests together"))
    return [(term, visible(str(value))) for term, value in rows]


def tested(result: Result) -> list[str]:
    """What was tested, a sentence each."""
    prompts = _plural(len(result["prompts"]), "prompt")
    match result["method"]:
        case "none":
            return ["Nothing: a rule that changes the law on purpose has nothing to be tested for."]
        case "enumeration":
            return [
                f"The law of whole outputs of at most {_plural(result['max_tokens'], 'token')}, "
                f"for {prompts}: all {result['courses']} courses of chance were walked, over "
                f"{result['outputs']} outputs.",
                "The production code made them. What they are compared with comes from the chain "
                "rule alone, without it.",
            ]
        case "tokens":
            return [
                f"{_plural(result['compared'], 'output')} ({result['compared_tokens']} tokens), "
                f"for {prompts}, token by token against plain decoding on the same seed.",
                "Where outputs part, whether rounding of the logits could have parted them "
                f"(a near-tie: at most {result['threshold']:g} logits between the two tokens).",
            ]
        case _ if not result.get("comparisons"):
            return [
                f"{_plural(result.get('compared', 0), 'answer')} of each address, for {prompts}, "
                "compared one by one."
            ]
        case _:
            names = ", ".join(c["name"] for c in result["comparisons"])
            return [
                f"{_plural(len(result['comparisons']), 'law')}, for {prompts}: {names}.",
                "Each by a chi-square and a G-test; Holm’s correction holds the probability of "
                f"any false alarm, over all of them, below {result['alpha']:g}.",
            ]


def unseen(result: Result) -> list[str]:
    """What could not be seen, a sentence each."""
    if result["method"] == "none":
        return ["Anything: no output was drawn, and how far the laws are apart was not measured."]
    common = [
        "Other prompts than those above.",
        f"Longer outputs: nothing after token {result['max_tokens']}.",
        "Other models, sampling values, draft lengths, number formats and devices.",
    ]
    if result.get("remembered"):
        common.append("The target’s cache from round to round: no context was scored twice.")
    if result["method"] == "enumeration":
        rounding = (
            "The rounding of the target’s logits: both sides were given the same ones, each "
            "context’s scored once."
            if result.get("remembered")
            else "The rounding of a real model’s logits: a toy’s are exact."
        )
        return [
            *common,
            "The seeded noise itself: each course of chance was given its probability by "
            "arithmetic, and no random number was drawn.",
            f"Differences of a probability below {result['tolerance']:g}, which are rounding.",
            rounding,
        ]
    if result["method"] == "tokens":
        least = 1 - 0.2 ** (1 / max(1, result["compared"]))
        chance = (
            "A fault that needs chance: at temperature 0 each prompt has one output."
            if result.get("sampling", {}).get("temperature") == 0
            else f"A fault that touches fewer than about {percent(least)} of outputs: it is seen "
            f"with a probability below {percent(0.8)}."
        )
        return [
            *common,
            chance,
            "The law of plain decoding: noise that is wrong on both sides is equal on both.",
            f"Faults that hide behind a near-tie of {result['threshold']:g} logits.",
        ]
    if not result.get("comparisons"):
        return [*common, "What stands behind an address, and whether it stays the same."]
    biases = [
        c["smallest_bias"] for c in result["comparisons"] if c["name"].startswith("position ")
    ]
    told = [
        f"Biases below {percent(max(biases, default=1.0))}, at some position: they are seen with "
        f"a probability below {percent(0.8)}.",
        "How rare outputs divide among themselves: they are counted together.",
    ]
    if result["method"] == "endpoints":
        told.append("What stands behind an address, and whether it stays the same.")
    return [*common, *told]


def further(result: Result) -> list[tuple[str, str]]:
    """Single values that the page shows nowhere else, with those one level down.

    >>> further({"retries": 2, "logprobs": {"compared": 5, "all": [1]}, "seed": 1})
    [('retries', '2'), ('logprobs compared', '5')]
    """
    rows: list[tuple[str, str]] = []
    for key, value in result.items():
        if key in _SHOWN:
            continue
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        for name, single in inner:
            if isinstance(single, (str, int, float)) or single is None:
                told = single if isinstance(single, str) else number(single)
                rows.append((visible(f"{key} {name}".replace("_", " ").strip()), visible(told)))
    return rows

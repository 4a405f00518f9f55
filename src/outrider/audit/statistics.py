"""Two-sample tests between outputs of plain decoding and of a configuration under test.

Samples come in strata, one a prompt. Each stratum's categories are binned so that both samples
expect at least ``LEAST_EXPECTED`` counts in every bin; statistics and degrees of freedom add up
over strata. Bins depend on the pooled counts alone, which under the null hypothesis say nothing
about how a bin divides between the two samples.

The law at each position, of each pair of neighbouring positions and of the whole output is
tested by a chi-square and a G-test; Holm's method holds the probability of any false alarm at
alpha. No outcome is called a pass: without enough samples, the verdict says so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float64, Int64

from outrider.errors import UsageError

try:
    from scipy import special, stats
except ModuleNotFoundError as error:
    raise UsageError(
        "An audit by samples needs scipy, which is not installed.",
        hint="Run: pip install outrider[audit]",
    ) from error

__all__ = [
    "BIASES",
    "ENDED",
    "ENOUGH_POWER",
    "LEAST_EXPECTED",
    "Bin",
    "Comparison",
    "Look",
    "Power",
    "Report",
    "Stratum",
    "Table",
    "Verdict",
    "compare",
    "holm",
    "power_of_bias",
    "samples_needed",
    "smallest_bias",
    "table_of",
    "total_variation",
]

LEAST_EXPECTED = 5.0
"""Least expected count of a bin, in each of the two samples."""

BIASES = (0.01, 0.02, 0.05)
"""Shifts of probability for which the power is told."""

ENOUGH_POWER = 0.8
"""Below this power to see the largest of ``BIASES`` at every position, samples are too few."""

ENDED = -1
"""In place of a token at a position that the output did not reach."""

_SHOWN = 5
_DRAWN = 24  # bins of a law that a picture shows, for each prompt

Verdict = Literal["consistent", "different", "not enough samples"]
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stratum:
    """Outputs for one prompt, as token ids: by plain decoding and by the configuration."""

    plain: Sequence[Sequence[int]]
    speculative: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Binned counts of one stratum. The label of the bin of rare categories is ``None``."""

    labels: tuple[Tokens | None, ...]
    plain: Int64[np.ndarray, " bins"]
    speculative: Int64[np.ndarray, " bins"]

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of samples of each kind."""
        return int(self.plain.sum()), int(self.speculative.sum())

    @property
    def pooled(self) -> Float64[np.ndarray, " bins"]:
        """Frequencies in both samples together."""
        both = self.plain + self.speculative
        return np.asarray(both / both.sum(), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Bin:
    """One bin's frequencies; ``z`` is their difference in standard errors of equal laws.

    ``token_ids`` is ``None`` for the bin of all rare categories; ``ENDED`` stands for a position
    that the output did not reach.
    """

    prompt: int
    token_ids: Tokens | None
    plain_frequency: float
    speculative_frequency: float
    z: float


@dataclass(frozen=True, slots=True)
class Power:
    """The probability to see a bias, and the samples (of each kind) that would see it.

    ``needed`` is ``None`` where the power is at least ``ENOUGH_POWER`` already.
    """

    bias: float
    probability: float
    needed: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One law, compared: which, how far apart, how improbable, and what could be seen.

    Parameters
    ----------
    name
        ``position 1``, ``positions 1-2`` or ``whole``.
    bins, degrees
        Bins over all strata; degrees of freedom.
    chi_square_p, g_p
        P values of the two tests, by themselves.
    adjusted_p
        The lower of the two after Holm's correction over all tests.
    tv, tv_low, tv_high
        Total variation between the binned laws, corrected for noise, and its interval.
    smallest_bias
        Least shift that would be seen with probability ``ENOUGH_POWER``.
    powers
        One for each of ``BIASES``.
    at_odds
        The bins most at odds, worst first.
    laws
        The most frequent bins of each prompt, most frequent first, to draw the laws from.
    """

    name: str
    bins: int
    degrees: int
    chi_square_p: float
    g_p: float
    adjusted_p: float
    tv: float
    tv_low: float
    tv_high: float
    smallest_bias: float
    powers: tuple[Power, ...]
    at_odds: tuple[Bin, ...]
    laws: tuple[Bin, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """One test of a sequential audit: outputs of each kind a prompt, its level, what it said."""

    samples: int
    alpha: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Report:
    """A verdict and all that it rests on.

    ``alpha`` is that of the whole audit; where it looked several times, each look tested at its
    own share, and ``comparisons`` are those of the last. How many tokens were drafted and
    accepted in all is told where it is known.
    """

    verdict: Verdict
    alpha: float
    plain_samples: int
    speculative_samples: int
    needed: int | None
    comparisons: tuple[Comparison, ...]
    looks: tuple[Look, ...] = ()
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None

    @property
    def worst(self) -> Comparison:
        """The comparison with the lowest adjusted p value."""
        return min(self.comparisons, key=lambda c: (c.adjusted_p, min(c.chi_square_p, c.g_p)))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {"method": "samples", **asdict(self), "worst": self.worst.name}


def table_of(plain: Sequence[Tokens], speculative: Sequence[Tokens]) -> Table:
    """Count and bin: rare categories go into one bin, which takes in more until it is large.

    Parameters
    ----------
    plain, speculative
        One category for each sample.

    Example
    -------
    >>> table = table_of([(0,)] * 28 + [(1,)] * 3, [(0,)] * 24 + [(2,)] * 7)
    >>> table.labels, table.plain.tolist(), table.speculative.tolist()
    (((0,), None), [28, 3], [24, 7])
    """
    first, second = Counter(plain), Counter(speculative)
    # By count, then by tokens: the order must not depend on the order of the samples.
    order = sorted({*first, *second}, key=lambda c: (-first[c] - second[c], c))
    share = min(len(plain), len(speculative)) / (len(plain) + len(speculative))
    kept = [c for c in order if (first[c] + second[c]) * share >= LEAST_EXPECTED]
    rest = order[len(kept) :]
    while rest and kept and sum(first[c] + second[c] for c in rest) * share < LEAST_EXPECTED:
        rest.insert(0, kept.pop())
    labels: tuple[Tokens | None, ...] = (*kept, None) if rest else tuple(kept)
    counts = [
        [*(counter[c] for c in kept), *([sum(counter[c] for c in rest)] if rest else [])]
        for counter in (first, second)
    ]
    return Table(labels, *(np.array(row, dtype=np.int64) for row in counts))


def _chi_square(table: Table) -> float:
    """sum (observed - expected)^2 / expected over both rows."""
    return _sum_over_rows(table, lambda observed, expected: (observed - expected) ** 2 / expected)


def _g(table: Table) -> float:
    """2 sum observed ln(observed / expected), divided by Williams' correction.

    Source: Williams 1976, "Improved likelihood ratio tests for complete contingency tables",
    Biometrika 63; without the correction, bins that expect 5 counts raise false alarms.
    """
    g = _sum_over_rows(
        table, lambda observed, expected: 2 * special.xlogy(observed, observed / expected)
    )
    bins, n = len(table.plain), sum(table.sizes)
    if bins < 2:
        return 0.0
    rows = sum(n / size for size in table.sizes) - 1
    columns = float((1 / table.pooled).sum()) - 1
    return g / (1 + rows * columns / (6 * n * (bins - 1)))


def _sum_over_rows(table: Table, term: Callable[[Any, Any], Any]) -> float:
    return sum(
        float(term(row.astype(np.float64), table.pooled * row.sum()).sum())
        for row in (table.plain, table.speculative)
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values: rejecting those at most alpha keeps the family-wise error at alpha.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[at]))
        adjusted[at] = highest
    return adjusted


def total_variation(
    tables: Sequence[Table], confidence: float = 0.95
) -> tuple[float, float, float]:
    """Total variation between binned laws, averaged over strata: estimate, and its interval.

    The plug-in V = sum |d| / 2, with d the difference of two frequencies, is too high by noise:
    E|N(d, s)| - |d| for each bin, s its standard error; that much, at the d that was found, is
    taken off the estimate. The interval holds for any number of samples: V is within
    t = sqrt(ln(2 / (1 - confidence)) C / 2) of its mean, C the sum of squares of what one
    sample can move (McDiarmid 1989), and its mean exceeds the truth by at most b = sum s / 2.
    So the truth is from V - b - t to V + t. Bins are taken as given; as pooling only lowers total
    variation, the lower end is one for the whole laws too.

    Example
    -------
    >>> same = [(0,)] * 500 + [(1,)] * 500
    >>> estimate, low, high = total_variation([table_of(same, same)])
    >>> (estimate, low) == (0.0, 0.0) and 0.04 < high < 0.07
    True
    """
    samples = sum(sum(table.sizes) for table in tables)
    plug_in = corrected = noise = moves = 0.0
    for table in tables:
        n, m = table.sizes
        weight = (n + m) / samples
        d = np.abs(table.plain / n - table.speculative / m)
        s = np.sqrt(table.pooled * (1 - table.pooled) * (1 / n + 1 / m))
        z = np.divide(d, s, out=np.zeros_like(d), where=s > 0)
        folded = s * math.sqrt(2 / math.pi) * np.exp(-(z**2) / 2) + d * special.erf(z / 2**0.5)
        plug_in += weight * float(d.sum()) / 2
        corrected += weight * float((2 * d - np.where(s > 0, folded, d)).sum()) / 2
        noise += weight * float(s.sum()) / 2
        moves += weight**2 * (1 / n + 1 / m)
    t = math.sqrt(math.log(2 / (1 - confidence)) * moves / 2)
    low, high = max(0.0, plug_in - noise - t), min(1.0, plug_in + t)
    return min(max(corrected, low), high), low, high


def power_of_bias(tables: Sequence[Table], bias: float, level: float, scale: float = 1.0) -> float:
    """The probability that a chi-square test sees a bias, with these bins and samples.

    The bias takes that much probability (all there is, if less) from the most probable bin of
    each stratum and divides it among the others in proportion to what they have. The statistic
    is then chi-square with noncentrality sum d^2 / (p (1/n + 1/m)) over bins, p the mean of the
    two laws. Source: Cohen 1988, "Statistical power analysis", chapter 7.

    Parameters
    ----------
    tables
        One a stratum; pooled frequencies are taken for the law.
    bias
        A probability.
    level
        False-alarm probability of the one test, alpha over the number of tests.
    scale
        Multiplies the number of samples.
    """
    degrees, noncentrality = 0, 0.0
    for table in tables:
        n, m = table.sizes
        p = table.pooled
        if len(p) == 1:  # what a bias would bring is another bin, next to empty now
            p = np.array([1 - 1 / (n + m), 1 / (n + m)])
        top = int(np.argmax(p))
        moved = min(bias, float(p[top]))
        d = moved * p / (1 - p[top])
        d[top] = -moved
        mean = p + d * m / (n + m)
        noncentrality += scale * float((d**2 / mean).sum()) / (1 / n + 1 / m)
        degrees += len(p) - 1
    return float(stats.ncx2.sf(stats.chi2.isf(level, degrees), degrees, noncentrality))


def samples_needed(tables: Sequence[Table], bias: float, level: float) -> int:
    """Samples of each kind that see a bias with probability ``ENOUGH_POWER``, bins kept."""
    now = sum(max(table.sizes) for table in tables)
    scale = _least(lambda s: power_of_bias(tables, bias, level, s), 1 / now, 1e9)
    return math.ceil(now * scale)


def smallest_bias(tables: Sequence[Table], level: float) -> float:
    """The least bias that is seen with probability ``ENOUGH_POWER``; 1.0 if none is."""
    return _least(lambda bias: power_of_bias(tables, bias, level), 1e-9, 1.0)


def _least(power: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising power reaches ``ENOUGH_POWER``, to one part in a thousand."""
    if power(high) < ENOUGH_POWER:
        return high
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if power(middle) >= ENOUGH_POWER else (middle, high)
    return high


def _bins(tables: Sequence[Table]) -> list[Bin]:
    """All bins, prompt by prompt, in the order of their tables: the most frequent first."""
    found: list[Bin] = []
    for prompt, table in enumerate(tables):
        n, m = table.sizes
        error = np.sqrt(table.pooled * (1 - table.pooled) * (1 / n + 1 / m))
        z = np.divide(
            table.speculative / m - table.plain / n,
            error,
            out=np.zeros_like(error),
            where=error > 0,
        )
        for label, a, b, score in zip(
            table.labels, table.plain / n, table.speculative / m, z, strict=True
        ):
            found.append(Bin(prompt, label, float(a), float(b), float(score)))
    return found


def _laws(bins: Sequence[Bin]) -> tuple[Bin, ...]:
    shown: Counter[int] = Counter()
    kept: list[Bin] = []
    for bin_ in bins:
        # The bin of rare categories stands last in its table, and belongs into the picture.
        if bin_.token_ids is None or shown[bin_.prompt] < _DRAWN:
            shown[bin_.prompt] += 1
            kept.append(bin_)
    return tuple(kept)


def _views(length: int) -> dict[str, tuple[int, int]]:
    """Slices of an output that are tested: positions, neighbouring pairs, the whole."""
    views = {f"position {i + 1}": (i, i + 1) for i in range(length)}
    views |= {f"positions {i + 1}-{i + 2}": (i, i + 2) for i in range(length - 1)}
    if length > 2:
        views["whole"] = (0, length)
    return views


def compare(strata: Sequence[Stratum], *, alpha: float = 1e-3) -> Report:
    """Test whether two samples of outputs have one law.

    The verdict is ``different`` if any of the tests rejects after Holm's correction at alpha;
    else ``not enough samples`` if at some position the power to see a bias of 5 %, the largest
    of ``BIASES``, is below ``ENOUGH_POWER``; else ``consistent``. Power is that of the
    chi-square test at Holm's strictest level, so it is not overstated.

    Parameters
    ----------
    strata
        One a prompt, each with at least one output of each kind.
    alpha
        Probability of a false alarm over all tests.

    Raises
    ------
    UsageError
        When alpha is not between 0 and 1, or a sample is empty.

    Example
    -------
    >>> outputs = [(i % 2, i % 3) for i in range(6000)]
    >>> compare([Stratum(outputs, outputs)]).verdict
    'consistent'
    """
    if not 0 < alpha < 1:
        raise UsageError(f"alpha must be between 0 and 1; got {alpha}.")
    if not strata or any(not s.plain or not s.speculative for s in strata):
        raise UsageError("An audit needs at least one sample of each kind for each prompt.")
    length = max(len(o) for s in strata for side in (s.plain, s.speculative) for o in side)
    views = {
        name: [
            table_of(_slices(s.plain, length, *span), _slices(s.speculative, length, *span))
            for s in strata
        ]
        for name, span in _views(length).items()
    }
    degrees = {n: sum(len(t.plain) - 1 for t in tables) for n, tables in views.items()}
    p_values: list[float] = []
    for name, tables in views.items():
        for statistic in (_chi_square, _g):
            total = sum(statistic(table) for table in tables)
            p_values.append(float(stats.chi2.sf(total, degrees[name])) if degrees[name] else 1.0)
    adjusted = holm(p_values)
    level = alpha / len(p_values)
    comparisons: list[Comparison] = []
    for i, (name, tables) in enumerate(views.items()):
        powers = []
        for bias in BIASES:
            power = power_of_bias(tables, bias, level)
            enough = power >= ENOUGH_POWER
            powers.append(
                Power(bias, power, None if enough else samples_needed(tables, bias, level))
            )
        bins = _bins(tables)
        comparisons.append(
            Comparison(
                name,
                sum(len(t.plain) for t in tables),
                degrees[name],
                p_values[2 * i],
                p_values[2 * i + 1],
                min(adjusted[2 * i : 2 * i + 2]),
                *total_variation(tables),
                smallest_bias(tables, level),
                tuple(powers),
                tuple(sorted(bins, key=lambda bin_: -abs(bin_.z))[:_SHOWN]),
                _laws(bins),
            )
        )
    needed = max((c.powers[-1].needed or 0 for c in comparisons[:length]), default=0) or None
    verdict: Verdict = "not enough samples" if needed else "consistent"
    if min(adjusted) <= alpha:
        verdict = "different"
    return Report(
        verdict,
        alpha,
        sum(len(s.plain) for s in strata),
        sum(len(s.speculative) for s in strata),
        needed,
        tuple(comparisons),
    )


def _slices(outputs: Sequence[Sequence[int]], length: int, start: int, end: int) -> list[Tokens]:
    return [(*o, *[ENDED] * (length - len(o)))[start:end] for o in outputs]

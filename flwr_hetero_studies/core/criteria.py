"""How a claim of a paper is judged, by one rule for all papers that was fixed before the runs.

Where training is random, a claim is about differences or ratios between runs of the same seed, at
least ten. It holds if the two-sided 95 % interval of their mean (Student's t) excludes zero. A
factor or a difference in the paper is reproduced if ours is within a factor of 1.5 of it.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

PAIRS = 10
"""Seeds of an experiment whose runs are random."""
FACTOR = 1.5
"""Largest ratio to the paper's size that is not another size."""
LEVEL = 0.95
REPRODUCED = "reproduced"
SIZE = "another size"
NOT = "not reproduced"
CONSTRUCTION = "by construction"
UNTESTED = "scale not tested"
VERDICTS = (REPRODUCED, SIZE, NOT, CONSTRUCTION, UNTESTED)
Values = Sequence[float] | NDArray[np.float64]
Interval = tuple[float, float, float]


class Claim(NamedTuple):
    """A sentence of the paper, what is found here, and the verdict."""

    text: str
    published: str
    found: str
    verdict: str


def interval(values: ArrayLike) -> Interval:
    """Return the mean of values of seeds and its two-sided interval, which one value lacks."""
    from scipy.stats import t

    each = np.asarray(values, dtype=float)
    if not np.isfinite(each).all():
        return math.nan, -math.inf, math.inf
    if len(each) < 2:
        return float(each.mean()), -math.inf, math.inf
    reach = t.ppf((1 + LEVEL) / 2, len(each) - 1) * each.std(ddof=1) / math.sqrt(len(each))
    return float(each.mean()), float(each.mean() - reach), float(each.mean() + reach)


def shown(found: Interval, form: str, unit: str = "") -> str:
    mean, low, high = found
    if math.isnan(mean):
        return "not in every run"
    spread = f" [{low:{form}}, {high:{form}}]" if math.isfinite(low) else ""
    return f"{mean:{form}}{spread}{unit}"


def sized(ratio: float) -> str:
    return REPRODUCED if 1 / FACTOR <= ratio <= FACTOR else SIZE


def higher(
    text: str,
    published: str,
    *gains: ArrayLike,
    size: float | None = None,
    form: str = "+.2f",
    unit: str = "",
) -> Claim:
    """Claim that each gain, paired by seed, is above zero; ``size`` is that of the first."""
    parts = [interval(each) for each in gains]
    ahead = all(low > 0 for _, low, _ in parts)
    verdict = REPRODUCED if ahead else NOT
    if ahead and size is not None:
        verdict = sized(parts[0][0] / size)
    return Claim(text, published, ", ".join(shown(part, form, unit) for part in parts), verdict)


def times(text: str, published: float, ratios: ArrayLike, most: float | None = None) -> Claim:
    """Claim a factor, or one up to ``most``, by the geometric mean of ratios; 0 is never."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        logs = interval(np.log(np.asarray(ratios, dtype=float)))
    mean, low, high = (math.exp(min(each, 700.0)) for each in logs)
    found = shown((mean, low if low else -math.inf, high), ".2f") + "x"
    if math.isnan(mean):
        found = "never in some run"
    # Compare with the nearest value of a range.
    verdict = sized(mean / min(max(mean, published), most or published)) if logs[1] > 0 else NOT
    printed = f"{published:g}x to {most:g}x" if most else f"{published:g}x"
    return Claim(text, printed, found, verdict)


def about(text: str, published: float, values: ArrayLike, form: str = ".2f") -> Claim:
    """Claim a size, such as a share: the mean over seeds is within a factor of 1.5 of it."""
    mean, *_ = found = interval(values)
    verdict = sized(mean / published) if mean > 0 else NOT
    return Claim(text, f"{published:{form}}", shown(found, form), verdict)


def within(
    text: str,
    published: str,
    *values: ArrayLike,
    low: float = -math.inf,
    high: float = math.inf,
    form: str = "+.2f",
    unit: str = "",
) -> Claim:
    """Claim that the whole intervals of values, each over seeds, are within bounds."""
    parts = [interval(each) for each in values]
    holds = all(low <= least and most <= high for _, least, most in parts)
    found = ", ".join(shown(part, form, unit) for part in parts)
    return Claim(text, published, found, REPRODUCED if holds else NOT)


def falls(text: str, published: str, columns: Mapping[str, Values], form: str = ".2f") -> Claim:
    """Claim that columns, each over the same seeds, fall from each to the next."""
    values = [np.asarray(each, dtype=float) for each in columns.values()]
    steps = [interval(a - b) for a, b in pairwise(values)]
    found = " > ".join(f"{name} {v.mean():{form}}" for name, v in zip(columns, values, strict=True))
    holds = all(low > 0 for _, low, _ in steps)
    if not holds:
        found += f" ({sum(low <= 0 for _, low, _ in steps)} steps not)"
    return Claim(text, published, found, REPRODUCED if holds else NOT)


def fact(text: str, published: str, found: str, holds: object) -> Claim:
    """Claim something that does not depend on chance."""
    return Claim(text, published, found, REPRODUCED if holds else NOT)


def made(text: str, published: str, found: str, holds: object) -> Claim:
    """Check what follows from how the experiment is built, and so is no evidence for a paper."""
    return Claim(text, published, found, CONSTRUCTION if holds else NOT)


def at_scale(claim: Claim, is_reached: bool) -> Claim:
    """Judge a claim only if its scale is reached here."""
    return claim if is_reached else claim._replace(verdict=UNTESTED)

"""Who reached a target how many times sooner, and why: plain functions on histories."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.report.history import FEDBUFF, TIFL, History, as_dict, settled_value
from flwr_hetero.report.nodes import num_tiers
from flwr_hetero.report.style import duration, figure, is_share, words

WINDOW = 5
"""Evaluations in the running median."""
NOTABLE = 1.1
"""Ratio from which rounds or their duration count as a reason."""


class Judge(NamedTuple):
    """What runs are judged by."""

    metric: str
    target: float
    clock: str
    falls: bool


class Result(NamedTuple):
    """A run as judged; ``cost`` is None if it does not reach the target."""

    seed: int | None
    end: float
    cost: float | None
    total: float


class Speed(NamedTuple):
    """How many times sooner than the baseline, and the range over seeds."""

    factor: float
    low: float
    high: float
    pairs: int


class Pace(NamedTuple):
    """How a run got on until its target, or its end."""

    unit: str
    rounds: float
    round_s: float
    tiers: tuple[float, ...]
    """Share of the rounds that each tier trained in."""
    staleness: float
    """Mean of merged replies; NaN where all of a round wait."""
    update: str = "merge"
    """In what staleness is counted."""


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Take the running median of five values; of fewer at the start, of the last five at the end.

    Notes
    -----
    One or two lucky rounds do not count, not even the last; a curve that only rises stays as it is
    but for its last two values.

    Examples
    --------
    >>> smooth(np.array([0.1, 0.2, 0.9, 0.3, 0.4, 0.5])).tolist()
    [0.1, 0.2, 0.3, 0.4, 0.4, 0.4]
    """
    half, last = WINDOW // 2, len(values) - 1
    middle = [max(min(place, last - half), min(place, half)) for place in range(len(values))]
    reach = [min(half, place) for place in middle]
    spans = [values[i - r : i + r + 1] for i, r in zip(middle, reach, strict=True)]
    return np.array([np.median(span) for span in spans], np.float64)


def default_target(baseline: Sequence[History], metric: str, *, falls: bool) -> float:
    """Return the mean end of the baseline's runs less a point; for no accuracy, less 1 %.

    A run's end is the median of its last five values.
    """
    end = float(np.mean([settled_value(run, metric, falls=falls) for run in baseline]))
    margin = 0.01 * (abs(end) if not is_share(metric) else 1.0 if abs(end) <= 1 else 100.0)
    return end + margin if falls else end - margin


def first_reach(run: History, judge: Judge) -> int | None:
    """Return the position of the round in which the smoothed metric reaches the target."""
    values = run.metric(judge.metric)
    known = np.flatnonzero(~np.isnan(values) & ~np.isnan(run.column(judge.clock)))
    curve = smooth(values[known])
    hits = np.flatnonzero(curve <= judge.target if judge.falls else curve >= judge.target)
    return int(known[hits[0]]) if len(hits) else None


def result_of(run: History, judge: Judge, seed: int | None = None) -> Result:
    """Judge a run."""
    times, place = run.column(judge.clock), first_reach(run, judge)
    cost = None if place is None else float(times[place])
    end = settled_value(run, judge.metric, falls=judge.falls)
    return Result(seed, end, cost, float(np.nanmax(times, initial=0.0)))


def speed_up(baseline: Sequence[Result], other: Sequence[Result]) -> Speed | None:
    """Return the ratio of mean costs, and the range over seeds; None if no pair got there.

    Runs are paired by seed where the two sides share seeds, else each with each.
    """
    shared = {run.seed for run in baseline} & {run.seed for run in other} - {None}
    pairs = [
        (before.cost, after.cost)
        for before in baseline
        for after in other
        if before.cost and after.cost and (not shared or before.seed == after.seed in shared)
    ]
    if not pairs:
        return None
    ratios = [before / after for before, after in pairs]
    before, after = np.sum(pairs, axis=0)
    return Speed(float(before / after), min(ratios), max(ratios), len(pairs))


def pace_of(run: History, judge: Judge) -> Pace:
    """Measure rounds, their duration, tiers and staleness until the target, or the end."""
    reached = first_reach(run, judge)
    place = len(run.rounds) - 1 if reached is None else reached
    clock = "wall_s" if judge.clock == "wall_s" else run.clock[0]
    times, rounds = run.column(clock), run.column("round")
    count = float(rounds[place] - rounds[0])
    seconds = float((times[place] - times[0]) / count) if count else np.nan
    drawn = run.column(TIFL, "tier")[: place + 1]
    known = drawn[~np.isnan(drawn)]
    tiers = [float(np.mean(known == t)) for t in range(num_tiers(run))] if len(known) else []
    merged = [as_dict(record.get(FEDBUFF)).get("staleness") or () for record in run.rounds]
    stale = [float(value) for values in merged for value in values if value is not None]
    mean = float(np.mean(stale)) if stale else np.nan
    return Pace(run.unit, float(rounds[place]), seconds, tuple(tiers), mean, run.update)


def mean_pace(paces: Sequence[Pace]) -> Pace:
    """Average over seeds; of tiers those runs that have as many as the first."""
    first = paces[0]
    tiers = [pace.tiers for pace in paces if len(pace.tiers) == len(first.tiers)]
    rounds, seconds, stale = (float(np.mean([pace[at] for pace in paces])) for at in (1, 2, 4))
    shares = tuple(np.mean(tiers, axis=0).tolist())
    return Pace(first.unit, rounds, seconds, shares, stale, first.update)


def reason(baseline: Pace, other: Pace, *, sooner: bool) -> str:
    """Say in one clause which of rounds and their duration made the difference."""
    parts = []  # ratio above 1: in favour of the other run
    if baseline.round_s > 0 and other.round_s > 0:
        text = f"a {other.unit} takes {duration(other.round_s)} instead of "
        text += duration(baseline.round_s) + _who(other)
        if baseline.unit != other.unit:
            text = text.replace("instead of", f"and a {baseline.unit}", 1)
        parts.append((baseline.round_s / other.round_s, text))
    if baseline.rounds and other.rounds and baseline.unit == other.unit:
        text = f"it needs {other.rounds:.0f} {other.unit}s instead of {baseline.rounds:.0f}"
        parts.append((baseline.rounds / other.rounds, text))
    parts.sort(key=lambda part: part[0], reverse=sooner)
    for_it = [text for r, text in parts if (r > NOTABLE if sooner else r < 1 / NOTABLE)]
    against = [text for r, text in parts if (r < 1 / NOTABLE if sooner else r > NOTABLE)]
    if not for_it:
        return ""
    clause = ", because " + " and ".join(for_it)
    return clause + (f", although {' and '.join(against)}" if against else "")


def _who(pace: Pace) -> str:
    """Say who trained: shares of the tiers, or how stale replies were."""
    if len(pace.tiers) > 1:
        fast, slow = (f"{100 * pace.tiers[at]:.0f} %" for at in (0, -1))
        return f" (the fastest tier has {fast} of the rounds, the slowest {slow})"
    if pace.staleness >= 0:
        return f" (replies are {pace.staleness:.1f} {pace.update}s stale on average)"
    return ""


def times(factor: float) -> str:
    """Write a ratio."""
    return f"{factor:.1f}x"


def cost_text(clock: str, cost: float | None, unit: str = "round") -> str:
    """Write a cost by a clock."""
    if cost is None:
        return "never"
    return f"{cost:.0f} {unit}s" if clock == "round" else duration(cost)


def verdict(
    names: tuple[str, str],
    judge: Judge,
    results: tuple[Sequence[Result], Sequence[Result]],
    paces: tuple[Pace, Pace],
) -> str:
    """Say in a sentence how the second group of runs did against the first, the baseline."""
    (base, name), (before, after) = names, results
    goal = f"{words(judge.metric)} {figure(judge.metric, judge.target)}"
    hits = [[run.cost for run in side if run.cost is not None] for side in results]
    units = [pace.unit for pace in paces]
    spent = [
        cost_text(judge.clock, mean, u) for mean, u in zip(map(mean_of, hits), units, strict=True)
    ]
    some = f" in {len(hits[1])} of {len(after)} runs" if len(hits[1]) < len(after) else ""
    found, why = speed_up(before, after), ""
    if not hits[1]:
        within = cost_text(judge.clock, max(run.total for run in after), units[1])
        text = f"{name} does not reach {goal} within {within} ({base}: after {spent[0]})"
        text = text if hits[0] else f"{name} does not reach {goal}, nor does {base},"
    elif found is None:
        text = f"{name} reaches {goal} after {spent[1]}{some} ("
        text += f"{base}: after {spent[0]})" if hits[0] else f"{base} does not)"
    else:
        ratio, low, high, pairs = found
        if ratio < 1:
            ratio, low, high = 1 / ratio, 1 / high, 1 / low
        way = "sooner" if found.factor >= 1 else "later"
        about = "as soon as" if times(ratio) == "1.0x" else f"{times(ratio)} {way} than"
        text = f"{name} reaches {goal} {about} {base}{some} ("
        if pairs > 1:
            both = {run.seed for run in before} & {run.seed for run in after} - {None}
            over = "seeds" if both else "pairs of runs"
            text += f"{times(low)} to {times(high)} over {pairs} {over}, "
        text += f"{spent[1]} instead of {spent[0]})"
        why = "" if about == "as soon as" else reason(*paces, sooner=found.factor > 1)
    ends = [float(np.mean([run.end for run in side])) for side in results]
    return f"{text}{_difference(judge.metric, ends)}{why}."


def mean_of(costs: Sequence[float]) -> float | None:
    """Return a mean; None of nothing."""
    return float(np.mean(costs)) if costs else None


def _difference(metric: str, ends: Sequence[float]) -> str:
    before, after = ends
    if is_share(metric):
        points = (after - before) * (100 if max(map(abs, ends)) <= 1 else 1)
        if abs(points) < 0.05:
            return f" and ends level ({figure(metric, after)})"
        shown = f"{abs(points):.1f} point{'' if f'{abs(points):.1f}' == '1.0' else 's'}"
    else:
        shown = f"{abs(after - before):.3g}"
    way = "higher" if after > before else "lower"
    return f" and ends {shown} {way} ({figure(metric, after)} against {figure(metric, before)})"

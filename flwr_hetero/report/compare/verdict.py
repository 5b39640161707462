"""Which runs reached a target how many times sooner, and why: plain functions on histories."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flwr_hetero.errors import check_choice, check_number
from flwr_hetero.report.history import CLOCKS, Floats, History
from flwr_hetero.report.style import duration, figure, is_share, words

# Evaluations in the running median, and at a run's end.
WINDOW = 5
NEVER = "never"
LOWER_IS_BETTER = ("loss", "error", "perplexity", "mse", "mae", "bound")


class Judge(NamedTuple):
    """What runs are judged by."""

    metric: str
    target: float
    clock: str

    @property
    def falls(self) -> bool:
        """Whether the metric improves by falling."""
        return lower_is_better(self.metric)


class Result(NamedTuple):
    """A run as judged; ``to_target`` and ``reached`` are None if it does not reach the target."""

    seed: int | None
    unit: str
    rounds: int
    end: float
    to_target: float | None
    bytes: float
    device_s: float
    reached: int | None
    """Number of the round in which it reached the target."""
    round_s: float
    """Mean time of a round until then, or until the run's end."""


class Speed(NamedTuple):
    """How many times sooner than the baseline, and the range over seeds."""

    factor: float
    low: float
    high: float
    pairs: int


# -- one run --


def lower_is_better(metric: str) -> bool:
    """Return whether a metric improves by falling, by its name."""
    return any(word in metric.lower() for word in LOWER_IS_BETTER)


def settled_value(history: History, metric: str) -> float:
    """Return the level that a run holds at its end: the median of its last five values."""
    values = history.metric(metric)
    tail = sorted(values[~np.isnan(values)][-WINDOW:].tolist(), reverse=lower_is_better(metric))
    # Of an even number the worse of the two in the middle.
    return float(tail[(len(tail) - 1) // 2])


def time_to_target(
    history: History, metric: str, target: float, clock: str = "virtual_s"
) -> float | None:
    """Return when a run first reaches a target: seconds or rounds since the start, None if never.

    The clock is "virtual_s", "wall_s" or "round". A running median of five evaluations counts.
    Whether the metric must fall to the target is by its name. ValueError for an unknown metric or
    clock, or a target that is not finite.

    Examples
    --------
    >>> rounds = [{"round": i, "virtual_s": 9.0 * i, "global": {"acc": i / 9}} for i in range(9)]
    >>> time_to_target(History((*rounds,)), "acc", 0.3)
    27.0
    """
    check_choice("clock", clock, CLOCKS)
    check_number("target", target, "(-inf, inf)")
    place = first_reach(history, Judge(metric, target, clock))
    return None if place is None else float(history.column(clock)[place])


def smooth(values: Floats) -> Floats:
    """Take the running median of five values; of fewer at the start, of the last five at the end.

    One or two outliers do not count, not even the last; a curve that only rises stays as it is but
    for its last two values.

    >>> smooth(np.array([0.1, 0.2, 0.9, 0.3, 0.4, 0.5])).tolist()
    [0.1, 0.2, 0.3, 0.4, 0.4, 0.4]
    """
    half, last = WINDOW // 2, len(values) - 1
    if len(values) < WINDOW:
        middle = [max(min(place, last - half), min(place, half)) for place in range(len(values))]
        reach = [min(half, place) for place in middle]
        spans = [values[i - r : i + r + 1] for i, r in zip(middle, reach, strict=True)]
        return np.array([np.median(span) for span in spans], np.float64)
    inner = np.median(np.lib.stride_tricks.sliding_window_view(values, WINDOW), axis=1)
    first = [np.median(values[: 2 * place + 1]) for place in range(half)]
    return np.concatenate([first, inner, np.repeat(inner[-1:], half)])


def default_target(baseline: Sequence[History], metric: str) -> float:
    """Return the mean end of the baseline's runs less a point; for no accuracy, less 1 %."""
    end = float(np.mean([settled_value(run, metric) for run in baseline]))
    margin = 0.01 * (abs(end) if not is_share(metric) else 1.0 if abs(end) <= 1 else 100.0)
    return end + margin if lower_is_better(metric) else end - margin


def first_reach(run: History, judge: Judge) -> int | None:
    """Return the position of the round in which the smoothed metric reaches the target."""
    values = run.metric(judge.metric)
    known = np.flatnonzero(~np.isnan(values) & ~np.isnan(run.column(judge.clock)))
    curve = smooth(values[known])
    hits = np.flatnonzero(curve <= judge.target if judge.falls else curve >= judge.target)
    return int(known[hits[0]]) if len(hits) else None


def result_of(run: History, judge: Judge, seed: int | None = None) -> Result:
    """Judge a run."""
    rounds, place = run.column("round"), first_reach(run, judge)
    until = len(rounds) - 1 if place is None else place
    clock = run.column("wall_s") if judge.clock == "wall_s" else run.clock[1]
    count = rounds[until] - rounds[0]
    return Result(
        seed=seed,
        unit=run.unit,
        rounds=run.last_round,
        end=settled_value(run, judge.metric),
        to_target=time_to_target(run, *judge),
        bytes=sum(float(np.nansum(run.column(key))) for key in ("bytes_up", "bytes_down")),
        device_s=float(run.busy_s.sum()),
        reached=None if place is None else int(rounds[place]),
        round_s=float((clock[until] - clock[0]) / count) if count else np.nan,
    )


# -- runs against others --


def speed_up(baseline: Sequence[Result], other: Sequence[Result]) -> Speed | None:
    """Return the ratio of mean costs, and the range over seeds; None if no pair reached the target.

    Runs are paired by seed where the two sides share seeds, else each with each.
    """
    shared = {run.seed for run in baseline} & {run.seed for run in other} - {None}
    pairs = [
        (before.to_target, after.to_target)
        for before in baseline
        for after in other
        if before.to_target and after.to_target
        if not shared or before.seed == after.seed in shared
    ]
    if not pairs:
        return None
    ratios = [before / after for before, after in pairs]
    before, after = np.sum(pairs, axis=0)
    return Speed(float(before / after), min(ratios), max(ratios), len(pairs))


def say(
    judge: Judge, names: tuple[str, str], results: tuple[Sequence[Result], Sequence[Result]]
) -> str:
    """Say in a sentence how the second group of runs did against the first, the baseline."""
    (base, name), (before, after) = names, results
    goal = f"{words(judge.metric)} {figure(judge.metric, judge.target)}"
    spent = [cost_text(judge.clock, mean(side, "to_target"), side[0].unit) for side in results]
    count, found = sum(run.to_target is not None for run in after), speed_up(before, after)
    some = f" in {count} of {len(after)} runs" if 0 < count < len(after) else ""
    if found is None:
        when = [cost if cost == NEVER else f"after {cost}" for cost in spent]
        text = f"{name} reaches {goal} {when[1]}{some}, {base} {when[0]},"
    else:
        text = f"{name} reaches {goal} {_ratio(found, base)}{some} ({_spread(found)}"
        text += f"{spent[1]} instead of {spent[0]})"
    ends = [figure(judge.metric, mean(side, "end")) for side in (after, before)]
    why = _rounds(before, after) if found else ""
    return f"{text} and ends at {ends[0]} against {ends[1]}{why}."


def _ratio(found: Speed, base: str) -> str:
    ratio = times(max(found.factor, 1 / found.factor))
    way = f"{ratio} {'sooner' if found.factor > 1 else 'later'} than"
    return f"{'as soon as' if ratio == times(1) else way} {base}"


def _spread(found: Speed) -> str:
    """Write the range over pairs of runs, by the same ratio; nothing of one pair."""
    low, high = (found.low, found.high) if found.factor > 1 else (1 / found.high, 1 / found.low)
    return f"{times(low)} to {times(high)} over {found.pairs} pairs, " if found.pairs > 1 else ""


def _rounds(before: Sequence[Result], after: Sequence[Result]) -> str:
    """Say how long rounds take and how many it needs: their product is the difference."""
    unit, other = before[0].unit, after[0].unit
    seconds = [mean(side, "round_s") for side in (before, after)]
    if not min(seconds) > 0:
        return ""
    both = "instead of" if unit == other else f"and a {unit}"
    text = f": a {other} takes {duration(seconds[1])} {both} {duration(seconds[0])}"
    # A server update is not the work of a round: their numbers say nothing beside each other.
    if unit == other:
        rounds = [mean(side, "reached") for side in (before, after)]
        text += f", and it needs {rounds[1]:.0f} {unit}s instead of {rounds[0]:.0f}"
    return text


def times(factor: float) -> str:
    """Write a ratio."""
    return f"{factor:.1f}x"


def cost_text(clock: str, cost: float | None, unit: str = "round") -> str:
    """Write a cost by a clock; None or NaN is that of a target never reached."""
    if cost is None or np.isnan(cost):
        return NEVER
    return f"{cost:.0f} {unit}s" if clock == "round" else duration(cost)


def mean(runs: Sequence[Result], name: str) -> float:
    """Return the mean of a figure over the runs that have it; NaN if none has."""
    known = [value for run in runs if (value := getattr(run, name)) is not None]
    return float(np.mean(known)) if known else np.nan

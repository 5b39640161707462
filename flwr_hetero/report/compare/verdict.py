"""Who reached a target how many times sooner, and why: plain functions on histories."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from flwr_hetero.errors import check_choice, check_number
from flwr_hetero.report.history import CLOCKS, FEDBUFF, TIFL, UPDATE, Floats, History, as_dict
from flwr_hetero.report.nodes import busy_s, num_tiers
from flwr_hetero.report.style import duration, figure, is_share, words

# Evaluations in the running median, and at a run's end.
WINDOW = 5
# Ratio from which rounds or their duration count as a reason.
NOTABLE = 1.1
LOWER_IS_BETTER = ("loss", "error", "perplexity", "mse", "mae", "bound")


class Judge(NamedTuple):
    """What runs are judged by."""

    metric: str
    target: float
    clock: str
    falls: bool


class Result(NamedTuple):
    """A run as judged; ``to_target`` and ``reached`` are None if it does not reach the target."""

    seed: int | None
    unit: str
    rounds: int
    last: float
    best: float
    end: float
    to_target: float | None
    total: float
    bytes: float
    device_s: float
    reached: int | None
    """Number of the round in which it got there."""
    round_s: float
    """Mean time of a round until then, or until its end, as all that follows."""
    fastest: float
    slowest: float
    """Share of the rounds in which the fastest and the slowest tier trained; NaN without."""
    staleness: float
    """Mean of the replies; NaN where all of a round wait."""


class Speed(NamedTuple):
    """How many times sooner than the baseline, and the range over seeds."""

    factor: float
    low: float
    high: float
    pairs: int


# -- one run --


def lower_is_better(metric: str) -> bool:
    """Return whether a metric improves by falling."""
    return any(word in metric.lower() for word in LOWER_IS_BETTER)


def settled_value(history: History, metric: str, *, falls: bool) -> float:
    """Return the level that a run holds at its end: the median of its last five values."""
    values = history.metric(metric)
    tail = sorted(values[~np.isnan(values)][-WINDOW:].tolist(), reverse=falls)
    return float(tail[(len(tail) - 1) // 2])


def time_to_target(
    history: History,
    metric: str,
    target: float,
    clock: str = "virtual_s",
    *,
    falls: bool | None = None,
) -> float | None:
    """Return when a run first reaches a target: seconds or rounds since the start, None if never.

    The clock is "virtual_s", "wall_s" or "round". Whether the metric must fall to the target is by
    its name unless ``falls`` says so.

    Raises
    ------
    ValueError
        If the metric or the clock is unknown, or the target not finite.

    Examples
    --------
    >>> rounds = [{"round": i, "virtual_s": 9.0 * i, "global": {"acc": 0.3 * i}} for i in range(4)]
    >>> time_to_target(History((*rounds,)), "acc", 0.5)
    18.0
    """
    check_choice("clock", clock, CLOCKS)
    check_number("target", target, "(-inf, inf)")
    values, times = history.metric(metric), history.column(clock)
    down = lower_is_better(metric) if falls is None else falls
    hits = times[(values <= target if down else values >= target) & ~np.isnan(times)]
    return float(hits[0]) if len(hits) else None


def smooth(values: Floats) -> Floats:
    """Take the running median of five values; of fewer at the start, of the last five at the end.

    One or two lucky rounds do not count, not even the last; a curve that only rises stays as it is
    but for its last two values.

    >>> smooth(np.array([0.1, 0.2, 0.9, 0.3, 0.4, 0.5])).tolist()
    [0.1, 0.2, 0.3, 0.4, 0.4, 0.4]
    """
    half, last = WINDOW // 2, len(values) - 1
    middle = [max(min(place, last - half), min(place, half)) for place in range(len(values))]
    reach = [min(half, place) for place in middle]
    spans = [values[i - r : i + r + 1] for i, r in zip(middle, reach, strict=True)]
    return np.array([np.median(span) for span in spans], np.float64)


def default_target(baseline: Sequence[History], metric: str, *, falls: bool) -> float:
    """Return the mean end of the baseline's runs less a point; for no accuracy, less 1 %."""
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
    values, times, rounds = run.metric(judge.metric), run.column(judge.clock), run.column("round")
    place = first_reach(run, judge)
    until = len(rounds) - 1 if place is None else place
    clock = run.column("wall_s") if judge.clock == "wall_s" else run.clock[1]
    count, drawn = rounds[until] - rounds[0], run.column(TIFL, "tier")[: until + 1]
    last_tier = num_tiers(run) - 1
    known = drawn[~np.isnan(drawn)] if last_tier > 0 else drawn[:0]
    merged = [as_dict(record.get(FEDBUFF)).get("staleness") or () for record in run.rounds]
    return Result(
        seed=seed,
        unit=run.unit,
        rounds=run.last_round,
        last=float(values[~np.isnan(values)][-1]),
        best=float(np.nanmin(values) if judge.falls else np.nanmax(values)),
        end=settled_value(run, judge.metric, falls=judge.falls),
        to_target=None if place is None else float(times[place]),
        total=float(np.nanmax(times, initial=0.0)),
        bytes=sum(float(np.nansum(run.column(key))) for key in ("bytes_up", "bytes_down")),
        device_s=float(busy_s(run).sum()),
        reached=None if place is None else int(rounds[place]),
        round_s=float((clock[until] - clock[0]) / count) if count else np.nan,
        fastest=mean_of(known == 0),
        slowest=mean_of(known == last_tier),
        staleness=mean_of([behind for replies in merged for behind in replies]),
    )


# -- runs against others --


def speed_up(baseline: Sequence[Result], other: Sequence[Result]) -> Speed | None:
    """Return the ratio of mean costs, and the range over seeds; None if no pair got there.

    Runs are paired by seed where the two sides share seeds, else each with each.
    """
    shared = _seeds(baseline, other)
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


def _seeds(baseline: Sequence[Result], other: Sequence[Result]) -> set[int | None]:
    return {run.seed for run in baseline} & {run.seed for run in other} - {None}


def verdict(
    judge: Judge, names: tuple[str, str], results: tuple[Sequence[Result], Sequence[Result]]
) -> str:
    """Say in a sentence how the second group of runs did against the first, the baseline."""
    (base, name), (before, after) = names, results
    goal = f"{words(judge.metric)} {figure(judge.metric, judge.target)}"
    spent = [cost_text(judge.clock, mean(side, "to_target"), side[0].unit) for side in results]
    is_there, count = (sum(run.to_target is not None for run in side) for side in results)
    some = f" in {count} of {len(after)} runs" if count < len(after) else ""
    found, why = speed_up(before, after), ""
    if not count and not is_there:
        text = f"{name} does not reach {goal}, nor does {base},"
    elif not count:
        within = cost_text(judge.clock, max(run.total for run in after), after[0].unit)
        text = f"{name} does not reach {goal} within {within} ({base}: after {spent[0]})"
    elif found is None:
        other = f"{base}: after {spent[0]}" if is_there else f"{base} does not"
        text = f"{name} reaches {goal} after {spent[1]}{some} ({other})"
    else:
        factor, low, high, pairs = found
        ratio, low, high = (factor, low, high) if factor >= 1 else (1 / factor, 1 / high, 1 / low)
        way = f"{times(ratio)} {'sooner' if factor >= 1 else 'later'} than"
        way = "as soon as" if (is_level := times(ratio) == "1.0x") else way
        over = f"{pairs} {'seeds' if _seeds(before, after) else 'pairs of runs'}"
        spread = f"{times(low)} to {times(high)} over {over}, " if pairs > 1 else ""
        text = f"{name} reaches {goal} {way} {base}{some} ({spread}"
        text += f"{spent[1]} instead of {spent[0]})"
        why = "" if is_level else _reason(before, after, sooner=factor > 1)
    return f"{text}{_difference(judge.metric, mean(before, 'end'), mean(after, 'end'))}{why}."


def _reason(before: Sequence[Result], after: Sequence[Result], *, sooner: bool) -> str:
    """Say in one clause which of rounds and their duration made the difference."""
    parts = []  # ratio above 1: in favour of the runs after
    unit, other = before[0].unit, after[0].unit
    seconds = [mean(side, "round_s") for side in (before, after)]
    if min(seconds) > 0:
        both = "instead of" if unit == other else f"and a {unit}"
        text = f"a {other} takes {duration(seconds[1])} {both} {duration(seconds[0])}{_who(after)}"
        parts.append((seconds[0] / seconds[1], text))
    rounds = [mean(side, "reached") for side in (before, after)]
    if min(rounds) > 0 and unit == other:
        text = f"it needs {rounds[1]:.0f} {unit}s instead of {rounds[0]:.0f}"
        parts.append((rounds[0] / rounds[1], text))
    parts.sort(key=lambda part: part[0], reverse=sooner)
    helps = [text for r, text in parts if (r > NOTABLE if sooner else r < 1 / NOTABLE)]
    costs = [text for r, text in parts if (r < 1 / NOTABLE if sooner else r > NOTABLE)]
    although = f", although {' and '.join(costs)}" if costs else ""
    return f", because {' and '.join(helps)}{although}" if helps else ""


def _who(runs: Sequence[Result]) -> str:
    """Say who trained: shares of the tiers, or how stale replies were."""
    fast, slow, stale = (mean(runs, name) for name in ("fastest", "slowest", "staleness"))
    if fast >= 0:
        text = f"the fastest tier has {100 * fast:.0f} % of the rounds, the slowest"
        return f" ({text} {100 * slow:.0f} %)"
    return f" (replies are {stale:.1f} {UPDATE}s stale on average)" if stale >= 0 else ""


def _difference(metric: str, before: float, after: float) -> str:
    if is_share(metric):
        points = abs(after - before) * (100 if max(abs(before), abs(after)) <= 1 else 1)
        if points < 0.05:
            return f" and ends level ({figure(metric, after)})"
        shown = f"{points:.1f} point{'' if f'{points:.1f}' == '1.0' else 's'}"
    else:
        shown = f"{abs(after - before):.3g}"
    way = "higher" if after > before else "lower"
    return f" and ends {shown} {way} ({figure(metric, after)} against {figure(metric, before)})"


def times(factor: float) -> str:
    """Write a ratio."""
    return f"{factor:.1f}x"


def cost_text(clock: str, cost: float | None, unit: str = "round") -> str:
    """Write a cost by a clock; None or NaN is that of a target never reached."""
    if cost is None or np.isnan(cost):
        return "never"
    return f"{cost:.0f} {unit}s" if clock == "round" else duration(cost)


def mean_of(values: Iterable[float | None]) -> float:
    """Return the mean of what is known; NaN of nothing."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else np.nan


def mean(runs: Sequence[Result], name: str) -> float:
    """Return the mean of a figure over runs."""
    return mean_of(getattr(run, name) for run in runs)

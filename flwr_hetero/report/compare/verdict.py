"""Which runs reached a target how many times sooner, and why: plain functions on histories."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flwr_hetero.errors import check_choice, check_number
from flwr_hetero.report.history import CLOCKS, Floats, History, Indices
from flwr_hetero.report.style import duration, figure, is_share, words

# Evaluations in the running median. Shorter runs are not judged by time.
WINDOW = 5
# With fewer evaluations nobody can tell noise from progress.
LEAST_EVALUATIONS = 3
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
    evaluations: int
    end: float
    noise: float
    """How far the end of another seed may lie from this one."""
    to_target: float | None
    bytes: float
    device_s: float
    reached: int | None
    """Number of the round in which it reached the target."""
    round_s: float
    """Mean time of a round until then, or until the run's end."""
    spacing: float
    """Mean time between evaluations, or rounds, by the clock that runs are judged by."""
    simulated: bool | None


class Speed(NamedTuple):
    """How many times sooner than the baseline, and the range over seeds."""

    factor: float
    low: float
    high: float
    pairs: int


class Verdict(NamedTuple):
    """What runs show beside a baseline."""

    text: str = ""
    winner: str | None = None
    """Name of the side that is better by end or time, and worse by neither."""
    speed: Speed | None = None


# -- one run --


def lower_is_better(metric: str) -> bool:
    """Return whether a metric improves by falling, by its name."""
    return any(word in metric.lower() for word in LOWER_IS_BETTER)


def trained_values(history: History, metric: str) -> tuple[Indices, Floats]:
    """Return the places and values of all evaluations but round 0's: its model is untrained."""
    values = history.metric(metric)
    places = np.flatnonzero(~np.isnan(values) & (history.column("round") != 0))
    return places, values[places]


def settled_value(history: History, metric: str) -> float:
    """Return the value that counts as a run's end; NaN without a trained model.

    It is the median of the last five evaluations, or with fewer than five the last one.
    """
    _, values = trained_values(history, metric)
    return float(smooth(values)[-1]) if len(values) else np.nan


def noise_of(history: History, metric: str) -> float:
    """Estimate how far the end of another seed may lie from this run's end.

    It is the largest step back among the last five values: steps forward may be progress. It is
    at least a point, or 1 % of what is no accuracy, because seeds differ in smooth runs, too.
    """
    _, values = trained_values(history, metric)
    steps_back = np.diff(values[-WINDOW:]) * (1 if lower_is_better(metric) else -1)
    return float(max([_margin(metric, settled_value(history, metric)), *steps_back]))


def _margin(metric: str, end: float) -> float:
    """Return a point; of what is no accuracy 1 %."""
    whole = 1.0 if abs(end) <= 1 else 100.0
    return 0.01 * (whole if is_share(metric) else abs(end))


def time_to_target(
    history: History, metric: str, target: float, clock: str = "virtual_s"
) -> float | None:
    """Return when a run first reaches a target: seconds or rounds since the start, None if never.

    The clock is "virtual_s", "wall_s" or "round". A running median of five evaluations counts; of
    fewer than five each counts. Round 0 does not. Whether the metric must fall to the target is by
    its name. ValueError for an unknown metric or clock, or a target that is not finite.

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
    for its last two values. Fewer than five values stay as they are.

    >>> smooth(np.array([0.1, 0.2, 0.9, 0.3, 0.4, 0.5])).tolist()
    [0.1, 0.2, 0.3, 0.4, 0.4, 0.4]
    """
    if len(values) < WINDOW:
        return values
    half = WINDOW // 2
    inner = np.median(np.lib.stride_tricks.sliding_window_view(values, WINDOW), axis=1)
    first = [np.median(values[: 2 * place + 1]) for place in range(half)]
    return np.concatenate([first, inner, np.repeat(inner[-1:], half)])


def default_target(baseline: Sequence[History], metric: str) -> float:
    """Return the mean end of the baseline's runs less a point; for no accuracy, less 1 %."""
    end = float(np.mean([settled_value(run, metric) for run in baseline]))
    return end + _margin(metric, end) * (1 if lower_is_better(metric) else -1)


def first_reach(run: History, judge: Judge) -> int | None:
    """Return the position of the round in which the smoothed metric reaches the target."""
    places, values = trained_values(run, judge.metric)
    curve = smooth(values)
    is_reached = curve <= judge.target if judge.falls else curve >= judge.target
    hits = places[is_reached & ~np.isnan(run.column(judge.clock)[places])]
    return int(hits[0]) if len(hits) else None


def result_of(run: History, judge: Judge, seed: int | None = None) -> Result:
    """Judge a run."""
    rounds, place = run.column("round"), first_reach(run, judge)
    until = len(rounds) - 1 if place is None else place
    clock = run.column("wall_s") if judge.clock == "wall_s" else run.clock[1]
    count = rounds[until] - rounds[0]
    evaluations = len(trained_values(run, judge.metric)[0])
    return Result(
        seed=seed,
        unit=run.unit,
        rounds=run.last_round,
        evaluations=evaluations,
        end=settled_value(run, judge.metric),
        noise=noise_of(run, judge.metric),
        to_target=time_to_target(run, *judge),
        bytes=sum(float(np.nansum(run.column(key))) for key in ("bytes_up", "bytes_down")),
        device_s=float(run.busy_s.sum()),
        reached=None if place is None else int(rounds[place]),
        round_s=float((clock[until] - clock[0]) / count) if count else np.nan,
        spacing=float(np.nanmax(run.column(judge.clock)) / evaluations),
        simulated=run.rounds[-1].get("simulated"),
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
    judge: Judge, names: tuple[str, str], sides: Sequence[Sequence[Result]], unlike: str = ""
) -> Verdict:
    """Say how the second group of runs did against the first, the baseline.

    ``unlike`` says why the two cannot be compared at all, if they cannot.
    """
    (base, name), (before, after) = names, sides
    doubt, has_ends, has_times = _doubt(judge, [*before, *after], unlike)
    speed = speed_up(before, after) if has_times else None
    better = _better_end(judge, sides) if has_ends else None
    sooner = _sooner(sides, speed, better) if has_times else None
    goal = f"{words(judge.metric)} {figure(judge.metric, judge.target)}"
    spent = [cost_text(judge.clock, mean(side, "to_target"), side[0].unit) for side in sides]
    count = sum(run.to_target is not None for run in after)
    some = f" in {count} of {len(after)} runs" if 0 < count < len(after) else ""
    if speed is None:
        when = f"reaches {goal} after {spent[1]}{some}" if count else f"never reaches {goal}"
        does = "never does" if spent[0] == NEVER else f"does after {spent[0]}"
        text = f"{name} {when}, {base} {does}"
    else:
        ratio = times(max(speed.factor, 1 / speed.factor))
        way = "as soon as" if sooner is None else f"{ratio} {('later', 'sooner')[sooner]} than"
        text = f"{name} reaches {goal} {way} {base}{some} ({_spread(speed)}"
        near = ", within one evaluation" if sooner is None and spent[0] != spent[1] else ""
        text += f"{spent[1]} instead of {spent[0]}{near})"
    ends = [figure(judge.metric, mean(side, "end")) for side in sides]
    if better is not None:
        word = "lower" if judge.falls else "higher"
        text += f". {names[better]} ends {word} ({ends[better]} against {ends[1 - better]})."
    else:
        within = ", within the noise of one seed" if has_ends and ends[0] != ends[1] else ""
        text += f" and ends at {ends[1]} against {ends[0]}{within}."
    text += _rounds(before, after, name) if speed else ""
    claims = {names[side] for side in (better, sooner) if side is not None}
    return Verdict(text + doubt, claims.pop() if len(claims) == 1 else None, speed)


def _doubt(judge: Judge, runs: Sequence[Result], unlike: str) -> tuple[str, bool, bool]:
    """Say what is missing for a winner; return, too, whether ends and times are comparable."""
    count = min(run.evaluations for run in runs)
    least = LEAST_EVALUATIONS if count < LEAST_EVALUATIONS else WINDOW
    few = f"that takes {least} evaluations of trained models, and a run has {count}"
    if unlike or count < LEAST_EVALUATIONS:
        return f" No winner is named: {unlike or few}.", False, False
    kinds = [run.simulated for run in runs]
    is_mixed = judge.clock != "round" and True in kinds and False in kinds
    if is_mixed or count < WINDOW:
        mixed = "the seconds of one are of simulated nodes, the other's of real ones"
        return f" Neither is named the sooner one: {mixed if is_mixed else few}.", True, False
    return "", True, True


def _better_end(judge: Judge, sides: Sequence[Sequence[Result]]) -> int | None:
    """Return the side that ends better by more than the noise: of a run, or between seeds."""
    before, after = (mean(side, "end") for side in sides)
    noises = [run.noise for side in sides for run in side]
    noises += [float(np.ptp([run.end for run in side])) for side in sides]
    is_noise = abs(after - before) <= max(noises)
    return None if is_noise else int((after > before) is not judge.falls)


def _sooner(
    sides: Sequence[Sequence[Result]], speed: Speed | None, better: int | None
) -> int | None:
    """Return the side that is sooner by more than the time between evaluations, and by 5 %.

    It is also the side that alone reaches the target, if the ends differ by more than noise.
    """
    if speed is None:
        alone = [i for i, side in enumerate(sides) if not np.isnan(mean(side, "to_target"))]
        return alone[0] if len(alone) == 1 and better is not None else None
    # Nothing can be an evaluation sooner than after round 1.
    spacings = [mean(side, "spacing") for side in sides if mean(side, "reached") > 1]
    gap = abs(speed.factor - 1) * mean(sides[1], "to_target")
    is_noise = gap <= max(spacings, default=0) or 0.95 <= speed.factor <= 1 / 0.95
    return None if is_noise else int(speed.factor > 1)


def _spread(found: Speed) -> str:
    """Write the range over pairs of runs, by the same ratio; nothing of one pair."""
    low, high = (found.low, found.high) if found.factor > 1 else (1 / found.high, 1 / found.low)
    return f"{times(low)} to {times(high)} over {found.pairs} pairs, " if found.pairs > 1 else ""


def _rounds(before: Sequence[Result], after: Sequence[Result], name: str) -> str:
    """Say how long rounds take and how many it needs: their product is the difference."""
    unit, other = before[0].unit, after[0].unit
    seconds = [mean(side, "round_s") for side in (before, after)]
    if not min(seconds) > 0:
        return ""
    both = "instead of" if unit == other else f"and a {unit}"
    text = f" A {other} takes {duration(seconds[1])} {both} {duration(seconds[0])}"
    # A server update is not the work of a round: their numbers say nothing beside each other.
    if unit == other:
        rounds = [mean(side, "reached") for side in (before, after)]
        text += f", and {name} needs {rounds[1]:.0f} {unit}s instead of {rounds[0]:.0f}"
    return f"{text}."


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

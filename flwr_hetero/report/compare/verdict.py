"""Which runs reach a target faster, and why: plain functions of histories."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flwr_hetero.report.history import Floats, History, Indices
from flwr_hetero.report.nodes import last_fairness, mean_over_nodes, slowest_nodes
from flwr_hetero.report.style import is_share

# Evaluations in the running median. Shorter runs are not judged by time.
WINDOW = 5
# With fewer evaluations nobody can tell noise from progress.
LEAST_EVALUATIONS = 3
LOWER_IS_BETTER = ("loss", "error", "perplexity", "mse", "mae", "bound")


class Judge(NamedTuple):
    """The metric, its target, and the clock by which runs are judged."""

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
    """The final value of the metric, see :func:`settled_value`."""
    noise: float
    """How far the final value of another seed may differ from this one."""
    to_target: float | None
    """Seconds, or rounds, to the target."""
    bytes: float
    """Bytes on the links, and the seconds for which nodes worked, until then or until the end."""
    device_s: float
    node_metric: str
    """The metric that nodes measured; empty if none evaluated the model."""
    slow: float
    """Its mean over the slowest nodes, and :attr:`worst` over the worst tenth, as last measured."""
    worst: float
    reached: int | None
    """Number of the round in which it reached the target."""
    round_s: float
    """Mean seconds of a round until then, or until the end of the run."""
    spacing: float
    """Mean time between evaluations by the judge's clock, in seconds or rounds."""
    simulated: bool | None


Side = Sequence[Result]
"""The runs of one kind, one per seed."""


class Speed(NamedTuple):
    """How many times faster than the baseline, and the range over pairs of runs."""

    factor: float
    low: float
    high: float
    pairs: int


def lower_is_better(metric: str) -> bool:
    """Return whether a metric improves by falling, judged by its name."""
    return any(word in metric.lower() for word in LOWER_IS_BETTER)


def trained_values(history: History, metric: str) -> tuple[Indices, Floats]:
    """Return places and values of all evaluations except round 0, whose model is untrained."""
    values = history.metric(metric)
    places = np.flatnonzero(~np.isnan(values) & (history.column("round") != 0))
    return places, values[places]


def settled_value(history: History, metric: str) -> float:
    """Return the final value of a metric; NaN if no trained model was evaluated.

    It is the median of the last five evaluations, or the last one if there are fewer than five.
    """
    _, values = trained_values(history, metric)
    return float(smooth(values)[-1]) if len(values) else np.nan


def noise_of(history: History, metric: str) -> float:
    """Estimate how far the final value of another seed may differ from that of this run.

    The estimate is the largest step back among the last five values, since a step forward may be
    progress. It is at least one percentage point of an accuracy, or 1 % of any other metric,
    because seeds differ in smooth runs too.
    """
    _, values = trained_values(history, metric)
    steps_back = np.diff(values[-WINDOW:]) * (1 if lower_is_better(metric) else -1)
    return float(max([_margin(metric, settled_value(history, metric)), *steps_back]))


def _margin(metric: str, final: float) -> float:
    """Return one percentage point of an accuracy, or 1 % of any other metric's value."""
    if is_share(metric):
        return 0.01 if abs(final) <= 1 else 1.0
    return 0.01 * abs(final)


def smooth(values: Floats) -> Floats:
    """Return the running median of five values.

    The median is over fewer values at the start, and over the last five at the end. One or two
    outliers change nothing, not even at the end. A curve that only rises stays as it is except
    for its last two values. Fewer than five values are returned unchanged.

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
    """Return the baseline's mean final accuracy minus one point; another metric made 1 % worse."""
    final = float(np.mean([settled_value(run, metric) for run in baseline]))
    return final + _margin(metric, final) * (1 if lower_is_better(metric) else -1)


def first_reach(run: History, judge: Judge) -> int | None:
    """Return the place of the round in which the metric reaches the target; None if it never does.

    A running median of five evaluations must reach it, or any evaluation if there are fewer than
    five. Round 0 is ignored.
    """
    places, values = trained_values(run, judge.metric)
    curve = smooth(values)
    is_reached = curve <= judge.target if judge.falls else curve >= judge.target
    hits = places[is_reached & ~np.isnan(run.column(judge.clock)[places])]
    return int(hits[0]) if len(hits) else None


def result_of(
    run: History, judge: Judge, seed: int | None = None, baseline: History | None = None
) -> Result:
    """Judge a run, on the nodes that are the slowest ones in the baseline if it has the same."""
    rounds = run.column("round")
    place = first_reach(run, judge)
    last = len(rounds) - 1 if place is None else place
    clock = run.column("wall_s") if judge.clock == "wall_s" else run.clock[1]
    count = rounds[last] - rounds[0]
    evaluations = len(trained_values(run, judge.metric)[0])
    fairness = last_fairness(run)
    return Result(
        seed=seed,
        unit=run.unit,
        rounds=run.last_round,
        evaluations=evaluations,
        end=settled_value(run, judge.metric),
        noise=noise_of(run, judge.metric),
        to_target=None if place is None else float(run.column(judge.clock)[place]),
        bytes=float(run.traffic[: last + 1].sum()),
        device_s=float(run.busy_s[: last + 1].sum()),
        node_metric=fairness.metric if fairness else "",
        slow=mean_over_nodes(run, slowest_nodes(baseline or run), slowest_nodes(run)),
        worst=fairness.worst if fairness else np.nan,
        reached=None if place is None else int(rounds[place]),
        round_s=float((clock[last] - clock[0]) / count) if count else np.nan,
        spacing=float(np.nanmax(run.column(judge.clock)) / evaluations),
        simulated=run.rounds[-1].get("simulated"),
    )


def speed_up(baseline: Side, other: Side) -> Speed | None:
    """Return the ratio of mean costs, and the range over seeds; None if no pair reached the target.

    Runs are paired by seed if the two sides share seeds, else each run with each.
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


def comparable(judge: Judge, runs: Side, unlike: str = "") -> tuple[bool, bool, str]:
    """Return whether final values and times can be compared, and why not.

    ``unlike`` is the reason why runs cannot be compared at all, if there is one.
    """
    count = min(run.evaluations for run in runs)
    least = LEAST_EVALUATIONS if count < LEAST_EVALUATIONS else WINDOW
    few = f"this needs {least} evaluations of trained models, and one of the runs has {count}"
    if unlike or count < LEAST_EVALUATIONS:
        return False, False, f"No winner is named: {unlike or few}."
    kinds = [run.simulated for run in runs]
    if judge.clock != "round" and True in kinds and False in kinds:
        mixed = "one ran on simulated nodes, the other on real nodes"
        return True, False, f"Neither is called faster: {mixed}."
    if count < WINDOW:
        return True, False, f"Neither is called faster: {few}."
    return True, True, ""


def better_side(judge: Judge, sides: tuple[Side, Side]) -> int | None:
    """Return the side, 1 for the second, whose final value is better by more than the noise."""
    before, after = (mean(side, "end") for side in sides)
    noises = [run.noise for side in sides for run in side]
    noises += [float(np.ptp([run.end for run in side])) for side in sides]
    is_noise = abs(after - before) <= max(noises)
    return None if is_noise else int((after > before) is not judge.falls)


def faster_side(sides: tuple[Side, Side], speed: Speed | None, better: int | None) -> int | None:
    """Return the side that is faster by more than the time between evaluations, and by 5 %.

    A side that alone reaches the target is faster if the final values differ by more than noise.
    """
    if speed is None:
        alone = [i for i, side in enumerate(sides) if not np.isnan(mean(side, "to_target"))]
        return alone[0] if len(alone) == 1 and better is not None else None
    # Nothing can be an evaluation faster than a run that reaches the target in round 1.
    spacings = [mean(side, "spacing") for side in sides if mean(side, "reached") > 1]
    gap = abs(speed.factor - 1) * mean(sides[1], "to_target")
    is_noise = gap <= max(spacings, default=0) or 0.95 <= speed.factor <= 1 / 0.95
    return None if is_noise else int(speed.factor > 1)


def mean(runs: Side, name: str) -> float:
    """Return the mean of a figure over the runs that have it; NaN if none has."""
    values = [getattr(run, name) for run in runs]
    present = [value for value in values if value is not None]
    return float(np.mean(present)) if present else np.nan

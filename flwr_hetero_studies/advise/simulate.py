"""Run settings on the emulated fleet, and rank them by the time to FedAvg's accuracy."""

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import exp, inf, log
from typing import Any, NamedTuple, Protocol

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.clientapp import ClientApp

from flwr_hetero._flwr import only_errors
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import ModelAverage, Wrapper
from flwr_hetero_studies.advise.candidates import Candidate

MARGIN, SMOOTHED = 0.01, 4
"""The target is FedAvg's end less this; looks at the model of which the mean counts."""
MOST_WORK = 20
"""A setting's trainings of a node, at most, in those of FedAvg."""
SLOWEST = 0.2
"""Part of the fleet that is its slowest tier."""
PER_POINT = 0.1
"""What a setting that has not reached the target is set back by, for each point that it lacks."""


class Learning(Protocol):
    """What the nodes train."""

    @property
    def app(self) -> ClientApp:
        """What a node does."""

    def first(self) -> ArrayRecord:
        """Draw the initial model."""

    def measure(self, arrays: ArrayRecord, slow: list[int]) -> tuple[float, float]:
        """Return accuracy on all test examples, and on classes as these nodes hold them."""


class Point(NamedTuple):
    """A look at the model."""

    virtual_s: float
    accuracy: float
    slow: float
    bytes: float
    device_s: float


@dataclass(frozen=True)
class Work:
    """One run to make: which setting, on which fleet, for how long."""

    candidate: Candidate
    learning: Learning
    profiles: tuple[DeviceProfile, ...]
    fast_steps: int
    clients_per_round: int
    rounds: int
    seed: int
    target: float | None = None
    """Where to end; None: after the rounds."""
    run_config: tuple[tuple[str, Any], ...] = ()

    def run(self) -> list[Point]:
        """Train to the target, or for all of the rounds."""
        random.seed(self.seed)
        own: dict[str, Any] = {"seed": self.seed, "run_config": dict(self.run_config)}
        with only_errors(), LocalGrid(self.learning.app, self.profiles, **own) as grid:
            watch = Watch(self)
            with suppress(Enough):
                watch.start(grid, self.learning.first(), 1_000_000, timeout=3600.0)
        return watch.points


class Enough(Exception):
    """Ends a run."""


class Watch(Wrapper):
    """Measure the model about as often as FedAvg has rounds, and end the run.

    It looks after updates of the model, of which a round of FedSlice has many.
    """

    def __init__(self, work: Work) -> None:
        super().__init__(work.candidate.strategy(work.fast_steps, work.seed))
        self.work, self.next_look, self.points = work, 0, list[Point]()
        self.bytes, self.device_s = 0.0, 0.0
        count = max(1, round(SLOWEST * len(work.profiles)))
        self.slow = list(range(len(work.profiles)))[-count:]
        self.most = work.rounds * work.clients_per_round
        self.most *= 1 if work.target is None else MOST_WORK

    def on_start(self, run: Any) -> None:
        """Know the grid that counts."""
        self.run = run

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message], context: Any = None
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add a point if it is time."""
        arrays, metrics = super().aggregate_train(server_round, replies, context)
        asked = self.run.grid.traffic.asked
        if asked >= self.next_look or asked >= self.most:
            self.next_look = asked + self.work.clients_per_round
            self._look(self.run.arrays if arrays is None else arrays)
        is_there = self.work.target is not None and reach(self.points, self.work.target)
        if asked >= self.most or is_there:
            raise Enough
        return arrays, metrics

    def _look(self, arrays: ArrayRecord) -> None:
        now_s = self.fleet.clock.virtual_s
        spent = self.fleet.costs.until(now_s)
        self.bytes += spent["bytes_down"] + spent["bytes_up"]
        self.device_s += spent["device_s"]
        measured = self.work.learning.measure(self._evaluated(arrays), self.slow)
        self.points.append(Point(now_s, *measured, self.bytes, self.device_s))

    def on_round_end(self, run: Any, record: dict[str, Any]) -> None:
        """Count what was spent since the last look."""
        self.bytes += record["bytes_down"] + record["bytes_up"]
        self.device_s += record["device_s"]

    def _evaluated(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the average where the setting has one."""
        averages = (each for each in self.wrappers() if isinstance(each, ModelAverage))
        average = next(averages, None)
        return arrays if average is None else average.averaged(arrays)


# --- judging ------------------------------------------------------------------------------


class Result(NamedTuple):
    """What a run came to, beside FedAvg's of the same task and seed."""

    speedup: float
    """FedAvg's time to the target over this one's; guessed downwards where it was not reached."""
    reached: bool
    bytes: float
    device_s: float
    """To the target, in FedAvg's."""
    slow: float
    """Accuracy on the data of the slowest nodes, at the target or at the end."""


def smooth(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Average each value with those just before it."""
    sums = np.cumsum(np.insert(np.asarray(values, float), 0, 0.0))
    starts = np.maximum(np.arange(1, len(sums)) - SMOOTHED, 0)
    return np.asarray((sums[1:] - sums[starts]) / (np.arange(1, len(sums)) - starts))


def reach(points: Sequence[Point], target: float) -> Point | None:
    """Return what the target took, by smoothed accuracy; None if it was not reached."""
    accuracy = smooth([point.accuracy for point in points])
    hits = np.flatnonzero(accuracy[SMOOTHED - 1 :] >= target)
    return points[int(hits[0]) + SMOOTHED - 1] if len(hits) else None


def target_of(base: Sequence[Point]) -> float:
    """Return what FedAvg comes to, less a point."""
    return float(smooth([point.accuracy for point in base])[-1]) - MARGIN


def judge(points: Sequence[Point], base: Sequence[Point]) -> Result:
    """Hold a run against FedAvg's."""
    target = target_of(base)
    usual, own = reach(base, target), reach(points, target)
    assert usual is not None  # its own end is above its target
    until = points if own is None else points[: points.index(own) + 1]
    slow = float(smooth([point.slow for point in until])[-1])
    if own is not None:
        costs = own.bytes / usual.bytes, own.device_s / max(usual.device_s, 1e-9)
        return Result(usual.virtual_s / own.virtual_s, True, *costs, slow)
    lacking = 100 * (target - float(smooth([point.accuracy for point in points])[-1]))
    late = usual.virtual_s / max(base[-1].virtual_s, points[-1].virtual_s)
    return Result(late * exp(-PER_POINT * max(0.0, lacking)), False, inf, inf, slow)


class Row(NamedTuple):
    """A setting's place in the ranking."""

    candidate: Candidate
    speedup: float
    """Geometric mean over seeds."""
    least: float
    most: float
    seeds: int
    reached: int
    bytes: float
    device_s: float
    slow: float


def row(candidate: Candidate, results: Sequence[Result]) -> Row:
    """Sum up a setting's runs."""
    speeds = [result.speedup for result in results]
    good = [result for result in results if result.reached]
    num_bytes, device_s = (
        float(np.mean([result[i] for result in good])) if good else inf for i in (2, 3)
    )
    slow = float(np.mean([result.slow for result in results]))
    mean = exp(sum(log(speed) for speed in speeds) / len(speeds))
    return Row(
        candidate, mean, min(speeds), max(speeds), len(speeds), len(good), num_bytes, device_s, slow
    )


Execute = Callable[[Iterable[Work]], list[list[Point]]]


def rank(
    choices: Sequence[Candidate],
    seeds: Sequence[int],
    make: Callable[[Candidate, int, float | None], Work],
    execute: Execute,
    *,
    halve: bool = True,
) -> list[Row]:
    """Rank settings, the best first: all by the first seed, then the better half by the others."""
    base, *others = choices
    bases = dict(zip(seeds, execute(make(base, seed, None) for seed in seeds), strict=True))
    found = {base.name: [judge(points, points) for points in bases.values()]}
    for group in (seeds[:1], seeds[1:]):
        work = [(choice, seed) for choice in others for seed in group]
        curves = execute(make(choice, seed, target_of(bases[seed])) for choice, seed in work)
        for (choice, seed), points in zip(work, curves, strict=True):
            found.setdefault(choice.name, []).append(judge(points, bases[seed]))
        if halve:
            others.sort(key=lambda choice: -found[choice.name][0].speedup)
            others = others[: (len(others) + 1) // 2]
    rows = [row(choice, found[choice.name]) for choice in choices]
    return sorted(rows, key=lambda row: -row.speedup)

"""Run settings on the emulated fleet, and rank them by their time to FedAvg's accuracy."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from logging import CRITICAL
from math import exp, inf, log
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero.exchange.context import NoProgressError
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero_studies.advise.candidates import Candidate
from flwr_hetero_studies.advise.task import run_config
from flwr_hetero_studies.core import curves
from flwr_hetero_studies.core.curves import Vector
from flwr_hetero_studies.core.emulate import Enough, Moment, drive
from flwr_hetero_studies.core.quiet import only_errors
from flwr_hetero_studies.race.node import Learning
from flwr_hetero_studies.race.watch import SLOWEST, SMOOTHED

MARGIN = 0.01
"""The target is FedAvg's end minus this."""
MOST_WORK = 20
"""A setting may send so many times as many messages as FedAvg."""
PER_POINT = 0.1
"""Penalty for each point of accuracy that a setting lacks to the target."""


class Point(NamedTuple):
    """A look at the model."""

    virtual_s: float
    accuracy: float
    slow: float
    bytes: float
    device_s: float


@dataclass(frozen=True)
class Simulation:
    """One run: which setting, on which fleet, for how long."""

    candidate: Candidate
    learning: Learning
    profiles: tuple[DeviceProfile, ...]
    """Sorted, the quickest first."""
    fast_steps: int
    clients_per_round: int
    rounds: int
    seed: int
    target: float | None = None
    """The accuracy at which to end; None: after the rounds."""
    run_config: tuple[tuple[str, Any], ...] = run_config()

    def run(self) -> list[Point]:
        """Train to the target or for all rounds, and look about as often as FedAvg has rounds."""
        count = max(1, round(SLOWEST * len(self.profiles)))
        slow = list(range(len(self.profiles)))[-count:]
        most = self.rounds * self.clients_per_round
        if self.target is not None:
            most *= MOST_WORK
        config = dict(self.run_config)
        grid = LocalGrid(self.learning.app, self.profiles, seed=self.seed, run_config=config)
        points: list[Point] = []
        next_look = 0

        def note(moment: Moment) -> None:
            nonlocal next_look
            asked = grid.num_sent
            watch = moment.watch
            # Count messages, because rounds differ in length between settings.
            if asked >= min(next_look, most):
                next_look = asked + self.clients_per_round
                watch.count_until(moment.virtual_s)
                # Measure what the setting would evaluate: its average, if it has one.
                model = {name: array.numpy() for name, array in moment.averaged.items()}
                found = self.learning.measure(model, slow)
                points.append(Point(moment.virtual_s, *found, watch.bytes, watch.device_s))
            if asked >= most or (self.target is not None and reach(points, self.target)):
                raise Enough

        # After a setting has diverged, no reply counts any more.
        with only_errors(CRITICAL), suppress(NoProgressError):
            strategy = self.candidate.strategy(self.fast_steps, self.seed)
            drive(strategy, grid, self.learning.first(), note, seed=self.seed, updates=True)
        return points


class Judgement(NamedTuple):
    """The outcome of a run, relative to FedAvg with the same task and seed."""

    speedup: float
    """FedAvg's time to the target over this one's, or a low guess if it was not reached."""
    reached: bool
    bytes: float
    device_s: float
    """Costs to the target, as multiples of FedAvg's."""
    slow: float
    """Accuracy on the data of the slowest nodes, at the target or at the end."""


def smooth(points: Sequence[Point], name: str = "accuracy") -> Vector:
    return curves.smooth([getattr(point, name) for point in points], SMOOTHED)


def reach(points: Sequence[Point], target: float) -> Point | None:
    """Return the point at which the smoothed accuracy is at the target, if there is one."""
    place = curves.reached(smooth(points)[SMOOTHED - 1 :], target)
    return None if np.isnan(place) else points[int(place) + SMOOTHED - 1]


def target_of(base: Sequence[Point]) -> float:
    return float(smooth(base)[-1]) - MARGIN


def judge(points: Sequence[Point], base: Sequence[Point]) -> Judgement:
    target = target_of(base)
    usual = reach(base, target)
    own = reach(points, target)
    # FedAvg's own end is above its target.
    assert usual is not None
    until = points if own is None else points[: points.index(own) + 1]
    slow = float(smooth(until, "slow")[-1])
    if own is not None:
        costs = own.bytes / usual.bytes, own.device_s / max(usual.device_s, 1e-9)
        return Judgement(usual.virtual_s / own.virtual_s, True, *costs, slow)
    lacking = 100 * (target - float(smooth(points)[-1]))
    # Count it as there at its end, with a penalty for what it lacks.
    late = usual.virtual_s / max(base[-1].virtual_s, points[-1].virtual_s)
    return Judgement(late * exp(-PER_POINT * max(0.0, lacking)), False, inf, inf, slow)


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


def row(candidate: Candidate, found: Sequence[Judgement]) -> Row:
    speeds = [each.speedup for each in found]
    good = [(each.bytes, each.device_s) for each in found if each.reached]
    num_bytes, device_s = np.mean(good, axis=0).tolist() if good else (inf, inf)
    mean = exp(sum(log(speed) for speed in speeds) / len(speeds))
    slow = float(np.mean([each.slow for each in found]))
    return Row(
        candidate, mean, min(speeds), max(speeds), len(speeds), len(good), num_bytes, device_s, slow
    )


def rank(
    choices: Sequence[Candidate],
    seeds: Sequence[int],
    make: Callable[[Candidate, int, float | None], Simulation],
    execute: Callable[[Iterable[Simulation]], list[list[Point]]],
) -> list[Row]:
    """Rank settings, the best first: all with the first seed, the better half with the others."""
    base, *others = choices
    bases = dict(zip(seeds, execute(make(base, seed, None) for seed in seeds), strict=True))
    found = {base.name: [judge(points, points) for points in bases.values()]}
    for group in (seeds[:1], seeds[1:]):
        work = [(choice, seed) for choice in others for seed in group]
        runs = execute(make(choice, seed, target_of(bases[seed])) for choice, seed in work)
        for (choice, seed), points in zip(work, runs, strict=True):
            found.setdefault(choice.name, []).append(judge(points, bases[seed]))
        # Time is short, so only the better half gets more seeds.
        others.sort(key=lambda choice: -found[choice.name][0].speedup)
        others = others[: (len(others) + 1) // 2]
    rows = [row(choice, found[choice.name]) for choice in choices]
    return sorted(rows, key=lambda row: -row.speedup)

"""A fleet that counts all that is sent and worked, and a run on it whose models are looked at."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

import numpy as np
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from flwr_hetero import keys
from flwr_hetero.client.device import FORWARD_SHARE, DeviceProfile
from flwr_hetero.client.emulation import work
from flwr_hetero.fleet import LocalGrid
from flwr_hetero.records import payload_bytes
from flwr_hetero.strategy import FedSlice, Wrapper
from flwr_hetero_studies.core.curves import columns, rounded
from flwr_hetero_studies.core.emulate import Enough, Moment, drive
from flwr_hetero_studies.race.methods import OWN_AVERAGE
from flwr_hetero_studies.race.network import Values
from flwr_hetero_studies.race.node import Learning

SLOWEST, BATCH_SIZE, SMOOTHED = 0.2, 16, 4
"""Part of the fleet that is its slowest tier; examples; looks of which the mean counts."""
WINDOWS = (1, 8, 32)
"""Rounds or merges over which models are averaged, as by ``ModelAverage``; 1: the newest."""


class MeteredGrid(LocalGrid):
    """Count every message when it is sent: evaluation, profiling, work that nobody waits for."""

    def __init__(self, client_app: ClientApp, profiles: Sequence[DeviceProfile], **how: Any):
        self.bytes, self.device_s, self.examples = 0, 0.0, 0.0
        super().__init__(client_app, profiles, **how)

    def _keep(self, message: Message, answer: tuple[float, Message | None]) -> str:
        _, reply = answer
        # counted when it is sent: work that nobody waits for costs as much
        self.bytes += payload_bytes(message.content)
        if reply is not None and reply.has_content():
            times = reply.content.config_records[keys.TIMING]
            # no real node sends an emulated device's own times
            own_bytes = payload_bytes(RecordDict({keys.TIMING: times}))
            self.bytes += payload_bytes(reply.content) - own_bytes
            self.device_s += float(times[keys.TRAIN_TIME]) + float(times[keys.TRANSFER_TIME])  # type: ignore[arg-type]
            processed, scored, hidden = work(reply)
            self.examples += processed + FORWARD_SHARE * (scored + hidden)
        return super()._keep(message, answer)


@dataclass
class Limits:
    """When a run ends, and how many examples are trained between two looks at the models."""

    seconds: float = inf
    examples: float = inf
    look: float = 800.0
    level: float = inf
    """Accuracy that the means of the last looks have with every average."""


class RunningAverage:
    """The running average that ``ModelAverage`` evaluates."""

    def __init__(self, window: int) -> None:
        self.window, self.count = window, 0
        self.model: dict[str, Values] = {}

    def add(self, model: dict[str, Values]) -> None:
        self.count += 1
        # the plain mean of the first models, then a window
        part = max(1 / self.count, 1 / self.window)
        for name, new in model.items():
            old = self.model.get(name, new)
            self.model[name] = np.asarray(old + part * (new - old), new.dtype)


class Looks:
    """Measures the newest and averaged models each so many examples, and ends the run."""

    def __init__(
        self, grid: MeteredGrid, learning: Learning, slow: list[int], split: str, limits: Limits
    ) -> None:
        self.grid, self.learning, self.slow = grid, learning, slow
        self.split, self.limits, self.next_look = split, limits, 0.0
        self.averages = [RunningAverage(window) for window in WINDOWS]
        self.points: list[dict[str, Any]] = []

    def note(self, moment: Moment) -> None:
        grid, limits = self.grid, self.limits
        # round 0 is the initial model, or profiling
        is_new = moment.watch.updates or moment.round > 0
        if is_new:
            for average in self.averages:
                average.add({name: array.numpy() for name, array in moment.arrays.items()})
        # equal time or equal energy, whichever is used up first
        over = moment.virtual_s >= limits.seconds or grid.examples >= limits.examples
        # by examples, not rounds or updates: an update may be one step or an epoch
        if is_new and (grid.examples >= self.next_look or over):
            self.next_look = grid.examples + limits.look
            point = {"virtual_s": moment.virtual_s, "examples": grid.examples}
            self.points.append(point | self.measured(moment))
            over = over or self.is_there()
        if over:
            raise Enough

    def is_there(self) -> bool:
        last = self.points[-SMOOTHED:]
        means = [np.mean([point[f"all/{window}"] for point in last]) for window in WINDOWS]
        return len(last) == SMOOTHED and min(means) >= self.limits.level

    def measured(self, moment: Moment) -> dict[str, float]:
        models = {average.window: average.model for average in self.averages}
        if moment.watch.updates:
            models[OWN_AVERAGE] = {k: array.numpy() for k, array in moment.averaged.items()}
        point: dict[str, float] = {"bytes": self.grid.bytes, "device_s": self.grid.device_s}
        for window, model in models.items():
            every, slow = self.learning.measure(model, self.slow, self.split)
            point |= {f"all/{window}": every, f"slow/{window}": slow}
        return point


def epoch_s(device: DeviceProfile, examples: float, model_mb: float) -> float:
    """Return what an epoch takes with both transfers of the model."""
    link_s = 8 * model_mb * (1 / device.uplink_mbps + 1 / device.downlink_mbps)
    return examples * device.seconds_per_example / device.compute_factor + link_s


def slowest(profiles: Sequence[DeviceProfile], size_bytes: float, examples: float) -> list[int]:
    times_s = [epoch_s(profile, examples, size_bytes / 1e6) for profile in profiles]
    order = sorted(range(len(profiles)), key=lambda number: (-times_s[number], -number))
    return sorted(order[: max(1, round(SLOWEST * len(profiles)))])


def rounds_of(learning: Learning, at_work: int | None, examples: float) -> int:
    """Return the rounds of FedAvg, with so many nodes at work, that train on so many examples."""
    each = learning.cut(learning.rows[0] // learning.num_nodes)
    return max(1, ceil(examples / (each * (at_work or learning.num_nodes))))


def race(
    learning: Learning,
    profiles: Sequence[DeviceProfile],
    strategy: Wrapper,
    *,
    rate: float,
    split: str,
    limits: Limits,
    app: ClientApp | None = None,
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train once; return the curve, and why no reply counted any more."""
    seed = learning.seed
    config = {"learning-rate": rate, "batch-size": BATCH_SIZE, "seed": seed, **(more or {})}
    grid = MeteredGrid(app or learning.app, profiles, seed=seed, run_config=config)
    first, failed = learning.first(), ""
    size = sum(len(array.data) for array in first.values())
    slow = slowest(profiles, size, learning.rows[0] / len(profiles))
    looks = Looks(grid, learning, slow, split, limits)
    slices = [each for each in strategy.wrappers() if isinstance(each, FedSlice)]
    # A round of FedSlice is as long as one of FedAvg: its models are looked at more often, and as
    # any user says, it is said how many rounds there are.
    how: dict[str, Any] = {"updates": bool(slices)}
    if slices and limits.examples < inf:
        how["rounds"] = rounds_of(learning, slices[0].rule.concurrency, limits.examples)
    try:
        drive(strategy, grid, first, looks.note, seed=seed, timeout=None, **how)
    # a model that has diverged: no reply counts any more
    except RuntimeError as error:
        failed = str(error)
    return {"metrics": {"failed": failed}, "curve": rounded(columns(looks.points))}

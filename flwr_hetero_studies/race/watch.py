"""A fleet that counts all traffic and work, and a run on it whose models are measured."""

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
from flwr_hetero_studies.core.curves import Columns, columns, rounded
from flwr_hetero_studies.core.emulate import Enough, Moment, drive
from flwr_hetero_studies.race.methods import OWN_AVERAGE
from flwr_hetero_studies.race.network import Values
from flwr_hetero_studies.race.node import Learning

SLOWEST = 0.2
"""Share of the fleet that is its slowest tier."""
BATCH_SIZE = 16
SMOOTHED = 4
"""Number of looks at the model of which the mean counts."""
WINDOWS = (1, 8, 32)
"""Rounds or server updates over which models are averaged; 1 stands for the newest model."""


class MeteredGrid(LocalGrid):
    """Count every message when it is sent, also those of profiling and those in vain."""

    def __init__(self, client_app: ClientApp, profiles: Sequence[DeviceProfile], **how: Any):
        self.bytes = 0
        self.device_s = 0.0
        self.examples = 0.0
        super().__init__(client_app, profiles, **how)

    def _keep(self, message: Message, answer: tuple[float, Message | None]) -> str:
        _, reply = answer
        # Count at once, because work that nobody waits for costs as much.
        self.bytes += payload_bytes(message.content)
        if reply is not None and reply.has_content():
            times = reply.content.config_records[keys.TIMING]
            # A real node does not send the times of an emulated device.
            own_bytes = payload_bytes(RecordDict({keys.TIMING: times}))
            self.bytes += payload_bytes(reply.content) - own_bytes
            self.device_s += float(times[keys.TRAIN_TIME]) + float(times[keys.TRANSFER_TIME])  # type: ignore[arg-type]
            processed, scored, hidden = work(reply)
            self.examples += processed + FORWARD_SHARE * (scored + hidden)
        return super()._keep(message, answer)


@dataclass(frozen=True)
class Limits:
    """When a run ends, and how many examples are trained between two looks at its models."""

    seconds: float = inf
    examples: float = inf
    look: float = 800.0


class RunningAverage:
    """The running average that ``ModelAverage`` evaluates."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.count = 0
        self.model: dict[str, Values] = {}

    def add(self, model: dict[str, Values]) -> None:
        self.count += 1
        # This is the plain mean of the first models, and later a window.
        part = max(1 / self.count, 1 / self.window)
        for name, new in model.items():
            old = self.model.get(name, new)
            self.model[name] = np.asarray(old + part * (new - old), new.dtype)


class Looks:
    """Measures the newest and the averaged models at intervals, and ends the run."""

    def __init__(
        self, grid: MeteredGrid, learning: Learning, slow: list[int], split: str, limits: Limits
    ) -> None:
        self.grid = grid
        self.learning = learning
        self.slow = slow
        self.split = split
        self.limits = limits
        self.next_look = 0.0
        self.averages = [RunningAverage(window) for window in WINDOWS]
        self.points: list[dict[str, Any]] = []

    def note(self, moment: Moment) -> None:
        examples = self.grid.examples
        # Round 0 is profiling, or only has the initial model.
        is_new = moment.watch.updates or moment.round > 0
        if is_new:
            for average in self.averages:
                average.add({name: array.numpy() for name, array in moment.arrays.items()})
        # A run has equal time or equal energy, whichever is used up first.
        over = moment.virtual_s >= self.limits.seconds or examples >= self.limits.examples
        # Intervals are in examples, because an update may be one step or a whole epoch.
        if is_new and (examples >= self.next_look or over):
            self.next_look = examples + self.limits.look
            point = {"virtual_s": moment.virtual_s, "examples": examples}
            self.points.append(point | self.measured(moment))
        if over:
            raise Enough

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
    """Return the seconds of an epoch with both transfers of the model."""
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
) -> tuple[dict[str, str], Columns]:
    """Train once; return why the run failed, if it did, as metrics, and the curve."""
    seed = learning.seed
    config = {"learning-rate": rate, "batch-size": BATCH_SIZE, "seed": seed}
    grid = MeteredGrid(learning.app, profiles, seed=seed, run_config=config)
    first = learning.first()
    size = sum(len(array.data) for array in first.values())
    slow = slowest(profiles, size, learning.rows[0] / len(profiles))
    looks = Looks(grid, learning, slow, split, limits)
    settings: dict[str, Any] = {}
    for part in strategy.wrappers():
        # A round of FedSlice is as long as one of FedAvg, so look after each server update. It is
        # given a number of rounds, as any user gives it.
        if isinstance(part, FedSlice):
            settings["updates"] = True
            if limits.examples < inf:
                at_work = part.rule.concurrency
                settings["rounds"] = rounds_of(learning, at_work, limits.examples)
    failed = ""
    try:
        drive(strategy, grid, first, looks.note, seed=seed, timeout=None, **settings)
    # When a model has diverged, no reply counts any more.
    except RuntimeError as error:
        failed = str(error)
    return {"failed": failed}, rounded(columns(looks.points))


def end_of(curve: Columns, window: int, stop: int | None = None) -> float:
    """Return the mean accuracy of the last looks, or of the last ones before a place."""
    count = len(curve["examples"]) if stop is None else stop
    # A fast run may have fewer looks than are averaged.
    return float(np.mean(curve[f"all/{window}"][max(0, count - SMOOTHED) : count]))


def place_of(curve: Columns, examples: float) -> int:
    return int(np.searchsorted(curve["examples"], examples))


def with_window(curve: Columns, window: int) -> Columns:
    """Keep costs, and the accuracies of the models averaged over a window."""
    kept = {key: curve[key] for key in ("virtual_s", "examples", "bytes", "device_s")}
    return kept | {key: curve[f"{key}/{window}"] for key in ("all", "slow")}

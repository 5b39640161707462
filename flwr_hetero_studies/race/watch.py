"""A fleet that counts all that is sent and worked, and a wrapper that looks at the models."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.client.device import FORWARD_SHARE, DeviceProfile
from flwr_hetero.client.emulation import work
from flwr_hetero.fleet import Fault, LocalGrid
from flwr_hetero.records import payload_bytes
from flwr_hetero.strategy import FedSlice, Wrapper
from flwr_hetero_studies.core.curves import columns, rounded
from flwr_hetero_studies.core.emulate import Enough
from flwr_hetero_studies.race.methods import OWN_AVERAGE
from flwr_hetero_studies.race.node import Task, client_app, first_model, parts, predict, splits

SLOWEST = 0.2
"""Part of the fleet that is its slowest tier."""
BATCH_SIZE = 16
WINDOWS = (1, 8, 32)
"""Rounds or merges over which models are averaged, as by ``ModelAverage``; 1: the newest."""


class MeteredGrid(LocalGrid):
    """Count every message, whatever it is for and whatever comes of it, when it is sent.

    Evaluation, profiling and work that is never merged or waited for are in it.
    """

    def __init__(self, client_app: ClientApp, profiles: Sequence[DeviceProfile], **how: Any):
        self.bytes, self.device_s, self.examples, self.messages = 0, 0.0, 0.0, 0
        self.jobs: list[tuple[float, float]] = []
        """When each job of training began and was over."""
        super().__init__(client_app, profiles, **how)

    def _keep(self, message: Message, answer: tuple[float, Message | None]) -> str:
        """Count an instruction and its reply, then keep the reply until it arrives."""
        arrival_s, reply = answer
        self.messages += 1
        self.bytes += payload_bytes(message.content)
        if reply is not None and reply.has_content():
            times = reply.content.config_records[keys.TIMING]
            self.bytes += payload_bytes(reply.content) - payload_bytes_of(times)
            self.device_s += float(times[keys.TRAIN_TIME]) + float(times[keys.TRANSFER_TIME])  # type: ignore[arg-type]
            if message.metadata.message_type == MessageType.TRAIN:
                self.jobs.append((self.virtual_time_s, arrival_s))
            processed, scored, hidden = work(reply)
            self.examples += processed + FORWARD_SHARE * (scored + hidden)
        return super()._keep(message, answer)

    def share_above(self, count: int, end_s: float) -> float:
        """Return the share of the time in which more nodes were training than that."""
        steps = sorted([(a, 1) for a, _ in self.jobs] + [(b, -1) for _, b in self.jobs])
        above_s = at_work = 0.0
        for (now_s, change), (next_s, _) in pairwise(steps):
            at_work += change
            if at_work > count:
                above_s += max(0.0, min(next_s, end_s) - now_s)
        return above_s / end_s if end_s else 0.0


def payload_bytes_of(times: ConfigRecord) -> int:
    """Return what an emulated device's own times count, which no real node sends."""
    return payload_bytes(RecordDict({keys.TIMING: times}))


@dataclass
class Limits:
    """When a run ends, and how many examples are trained between two looks at the models."""

    seconds: float = inf
    examples: float = inf
    look: float = 800.0


@dataclass
class Quality:
    """Accuracy on all examples, and on classes as the slowest nodes hold them."""

    task: Task
    split: str
    seed: int
    slow: NDArray[np.int64]
    """Numbers of the slowest nodes."""
    shares: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        labels, rows = splits(self.task)["train"].labels, parts(self.task, self.seed)
        theirs = np.concatenate([labels[rows[number]] for number in self.slow])
        self.shares = np.bincount(theirs, minlength=int(labels.max()) + 1) / len(theirs)

    def of(self, model: dict[str, NDArray[Any]]) -> tuple[float, float]:
        """Measure a model."""
        inputs, labels = splits(self.task)[self.split]
        right = predict(self.task, model, inputs).argmax(1) == labels
        counts = np.maximum(np.bincount(labels, minlength=len(self.shares)), 1)
        by_class = np.bincount(labels, right, len(self.shares)) / counts
        return float(right.mean()), float(self.shares @ by_class)


class Average:
    """The running average that ``ModelAverage`` evaluates."""

    def __init__(self, window: int) -> None:
        self.window, self.count = window, 0
        self.model: dict[str, NDArray[Any]] = {}

    def add(self, model: dict[str, NDArray[Any]]) -> None:
        """Take in the newest model."""
        self.count += 1
        part = max(1 / self.count, 1 / self.window)
        for name, new in model.items():
            old = self.model.get(name, new)
            self.model[name] = np.asarray(old + part * (new - old), new.dtype)


class Watch(Wrapper):
    """Measure the newest and averaged models each so many examples, and end the run."""

    def __init__(self, strategy: Strategy, quality: Quality, limits: Limits) -> None:
        super().__init__(strategy)
        self.quality, self.limits = quality, limits
        self.averages = [Average(window) for window in WINDOWS]
        self.next_look = 0.0
        self.points: list[dict[str, Any]] = []
        self.said_bytes, self.said_device_s = 0, 0.0
        self._has_updates = any(isinstance(each, FedSlice) for each in self.wrappers())

    def on_start(self, run: Any) -> None:
        """Know the grid that counts."""
        self.run = run

    def aggregate_train(self, server_round: int, replies: Any, context: Any = None) -> Any:
        """Look at each server update of a strategy whose rounds have several."""
        arrays, metrics = super().aggregate_train(server_round, replies, context)
        if self._has_updates:
            self._see(arrays or context.arrays, self.fleet.clock.virtual_s, is_new=True)
        return arrays, metrics

    def on_round_end(self, run: Any, record: dict[str, Any]) -> None:
        """Look at each round's model."""
        self.said_bytes += record["bytes_down"] + record["bytes_up"]
        self.said_device_s += record.get("device_s", sum(record["latency"].values()))
        if not self._has_updates:
            self._see(run.arrays, record["virtual_s"], is_new=record["round"] > 0)

    def _see(self, arrays: Any, now_s: float, *, is_new: bool) -> None:
        """Add a point if it is time."""
        grid, limits = self.run.grid, self.limits
        model = {name: array.numpy() for name, array in arrays.items()}
        for average in self.averages if is_new else []:
            average.add(model)
        over = now_s >= limits.seconds or grid.examples >= limits.examples
        if is_new and (grid.examples >= self.next_look or over):
            self.next_look = grid.examples + limits.look
            point = {"virtual_s": now_s, "examples": grid.examples}
            point |= {"bytes": grid.bytes, "device_s": grid.device_s}
            for window, seen in self._models(arrays).items():
                every, slow = self.quality.of(seen)
                point |= {f"all/{window}": every, f"slow/{window}": slow}
            self.points.append(point)
        if over:
            raise Enough

    def _models(self, arrays: Any) -> dict[int, dict[str, NDArray[Any]]]:
        """Return the newest model and averages; FedSlice's own in place of the longest."""
        found = {average.window: average.model for average in self.averages}
        if self._has_updates:
            own = self.averaged(arrays)
            found[OWN_AVERAGE] = {name: array.numpy() for name, array in own.items()}
        return found


def slowest(profiles: Sequence[DeviceProfile], size_bytes: float, examples: float) -> list[int]:
    """Return the fifth of the nodes that take longest for an epoch."""
    times_s = [
        examples * p.seconds_per_example / p.compute_factor
        + 8e-6 * size_bytes * (1 / p.uplink_mbps + 1 / p.downlink_mbps)
        for p in profiles
    ]
    order = sorted(range(len(profiles)), key=lambda number: (-times_s[number], -number))
    return sorted(order[: max(1, round(SLOWEST * len(profiles)))])


def race(
    task: Task,
    profiles: Sequence[DeviceProfile],
    strategy: Strategy,
    at_work: int,
    *,
    rate: float,
    seed: int,
    split: str,
    limits: Limits,
    round_cost_s: float = 0.0,
    app: ClientApp | None = None,
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train once; return the curve and what was counted."""
    config = {"learning-rate": rate, "batch-size": BATCH_SIZE, "seed": seed, **(more or {})}
    late = [Fault(n, "late", delay_s=round_cost_s) for n in range(len(profiles))]
    faults = late if round_cost_s else []
    app = app or client_app(task)
    grid = MeteredGrid(app, profiles, seed=seed, run_config=config, faults=faults)
    first = first_model(task, seed)
    size = sum(len(array.data) for array in first.values())
    slow = slowest(profiles, size, task.train / len(profiles))
    quality = Quality(task, split, seed, np.array(slow))
    watch = Watch(strategy, quality, limits)
    failed = ""
    with suppress(Enough):
        try:
            watch.start(grid, first, 1_000_000, timeout=None)
        except RuntimeError as error:  # a model that has diverged: no reply counts any more
            failed = str(error)
    said = {"said_bytes": watch.said_bytes, "said_device_s": round(watch.said_device_s, 3)}
    counted = {"bytes": grid.bytes, "device_s": round(grid.device_s, 3)}
    counted |= {"examples": round(grid.examples, 1), "messages": grid.messages}
    counted["above"] = round(grid.share_above(at_work, watch.points[-1]["virtual_s"]), 5)
    return {"metrics": counted | said | {"failed": failed}, "curve": rounded(columns(watch.points))}

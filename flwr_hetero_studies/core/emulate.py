"""Train on an emulated fleet in this process, and note what happens on the way."""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any, NamedTuple

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import ModelAverage, Wrapper
from flwr_hetero_studies import tasks
from flwr_hetero_studies.core.curves import Columns, columns, rounded

ENDLESS = 1_000_000
"""Rounds of a run that its notes end."""
Measure = Callable[[int, ArrayRecord], MetricRecord]


class Enough(Exception):
    """Ends a run before its last round."""


class Moment(NamedTuple):
    """Where a run stands after a round or a server update."""

    round: int
    arrays: ArrayRecord
    """The newest model."""
    virtual_s: float
    record: Mapping[str, Any]
    """The round's line of the history; empty after a server update within one."""
    watch: "Watch"

    @property
    def averaged(self) -> ArrayRecord:
        """The average of models where the strategy has one, else the newest."""
        part = next((w for w in self.watch.wrappers() if isinstance(w, ModelAverage)), None)
        return self.arrays if part is None else part.averaged(self.arrays)


Note = Callable[[Moment], None]
"""Looks at a run, and raises :class:`Enough` to end it."""


class Watch(Wrapper):
    """Show each round, or each server update, to a note; count what the history says of costs."""

    def __init__(self, strategy: Strategy, note: Note, *, updates: bool = False) -> None:
        super().__init__(strategy)
        self.note, self.updates = note, updates
        self.bytes, self.device_s = 0, 0.0

    def aggregate_train(self, server_round: int, replies: Any, context: Any = None) -> Any:
        # the model is shown after all wrappers inside have had their say
        arrays, metrics = super().aggregate_train(server_round, replies, context)
        if self.updates:
            newest, now_s = arrays or context.arrays, self.fleet.clock.virtual_s
            self.note(Moment(server_round, newest, now_s, {}, self))
        return arrays, metrics

    def on_round_end(self, run: Any, record: dict[str, Any]) -> None:
        self._count(record)
        if not self.updates:
            self.note(Moment(record["round"], run.arrays, record["virtual_s"], record, self))

    def count_until(self, now_s: float) -> None:
        """Count what was spent in a round that still goes on."""
        self._count(self.fleet.costs.until(now_s))

    def _count(self, spent: Mapping[str, Any]) -> None:
        self.bytes += spent["bytes_down"] + spent["bytes_up"]
        self.device_s += spent["device_s"]


def drive(
    strategy: Strategy,
    grid: LocalGrid,
    arrays: ArrayRecord,
    note: Note,
    *,
    seed: int,
    rounds: int = ENDLESS,
    updates: bool = False,
    **how: Any,
) -> Watch:
    """Train on a grid until the note has enough; ``how`` is for ``Strategy.start``."""
    # Flower draws the nodes of a round from it
    random.seed(seed)
    watch = Watch(strategy, note, updates=updates)
    # the note ends the run from within a hook, so that nothing more is sent
    with suppress(Enough):
        watch.start(grid, arrays, rounds, **how)
    return watch


def emulate(
    app: ClientApp,
    settings: tasks.Settings,
    strategy: Strategy,
    profiles: Sequence[DeviceProfile],
    run_config: dict[str, Any],
    *,
    note: Callable[[Moment], dict[str, Any]] = lambda moment: {},
    budget_s: float = inf,
    charged: bool = True,
    every: int = 1,
    arrays: ArrayRecord | None = None,
    train_config: dict[str, Any] | None = None,
    measure: Measure | None = None,
) -> Columns:
    """Train what the apps train, and return the curve: a point where the model was measured.

    The global model is measured every so many rounds or merges and after the last; ``note`` adds
    to a point. The run ends with the first round after ``budget_s`` of virtual time; profiling
    counts if it is ``charged``.
    """
    measure, rounds = measure or tasks.central_evaluate(settings), settings.num_server_rounds
    points: list[dict[str, Any]] = []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        # measuring is outside the clock; its cost is ours alone
        return measure(number, arrays) if number % every == 0 or number == rounds else None

    def add(moment: Moment) -> None:
        more, record, watch = note(moment), moment.record, moment.watch
        if record["global"]:
            point = {"round": moment.round, "virtual_s": moment.virtual_s}
            point |= {"accuracy": record["global"]["accuracy"], "bytes": watch.bytes}
            points.append(point | {"device_s": watch.device_s} | more)
        # what was spent until the first point is profiling
        free_s = 0.0 if charged else points[0]["virtual_s"]
        if moment.virtual_s - free_s > budget_s:
            raise Enough

    grid = LocalGrid(app, profiles, seed=settings.seed, run_config=run_config)
    first = tasks.initial_arrays(settings) if arrays is None else arrays
    given = ConfigRecord(train_config or {})
    how: dict[str, Any] = {"train_config": given, "evaluate_fn": evaluate}
    drive(strategy, grid, first, add, seed=settings.seed, rounds=rounds, **how)
    return rounded(columns(points))


def config_of(
    dataset: str, partition: str, rate: float, seed: int, rounds: int = ENDLESS
) -> dict[str, Any]:
    """Write the run-config of an app's plain training in batches of 16."""
    config = {"dataset": dataset, "partition": partition, "learning-rate": rate, "seed": seed}
    return config | {"num-server-rounds": rounds, "batch-size": 16}


def with_last_classes(settings: tasks.Settings, count: int) -> Measure:
    """Measure all test examples, and as ``slow`` those of the last classes."""
    test, shape = tasks.load_test(settings.dataset), tasks.data_shape(settings.dataset)
    # the partition classes-by-speed gives these to the slowest nodes
    slow = test.targets > test.targets.max() - count

    @torch.inference_mode()
    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = tasks.model_from(arrays.to_torch_state_dict(), settings.model, *shape).eval()
        found = torch.cat([model(part).argmax(1) for part in torch.split(test.inputs, 500)])
        right = (found == test.targets).float()
        return MetricRecord({"accuracy": float(right.mean()), "slow": float(right[slow].mean())})

    return evaluate

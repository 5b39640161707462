"""Train on an emulated fleet in this process, and measure the model on the way."""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import ModelAverage, Wrapper
from flwr_hetero_studies import tasks
from flwr_hetero_studies.core.curves import Columns, columns, rounded

ENDLESS = 1_000_000
"""Rounds of a run that its note ends."""
Measure = Callable[[int, ArrayRecord], MetricRecord]


class Enough(Exception):
    """Ends a run before its last round."""


class Moment(NamedTuple):
    """The state of a run after a round or a server update."""

    round: int
    arrays: ArrayRecord
    """The newest model."""
    virtual_s: float
    record: Mapping[str, Any]
    """The round's line of the history, which is empty after a server update."""
    watch: "Watch"

    @property
    def averaged(self) -> ArrayRecord:
        """The strategy's average of models if it has one, else the newest model."""
        part = next((w for w in self.watch.wrappers() if isinstance(w, ModelAverage)), None)
        return self.arrays if part is None else part.evaluated_model(self.arrays)


Note = Callable[[Moment], None]
"""Looks at a run, and raises :class:`Enough` to end it."""


class Watch(Wrapper):
    """Show each round, or each server update, to a note, and sum the costs of the history."""

    def __init__(self, strategy: Strategy, note: Note, *, updates: bool = False) -> None:
        super().__init__(strategy)
        self.note = note
        self.updates = updates
        self.bytes = 0
        self.device_s = 0.0

    def aggregate_train(self, server_round: int, replies: Any, context: Any = None) -> Any:
        # All wrappers inside have changed the model before it is shown.
        arrays, metrics = super().aggregate_train(server_round, replies, context)
        if self.updates:
            newest = arrays or context.arrays
            self.note(Moment(server_round, newest, self.fleet.clock.virtual_s, {}, self))
        return arrays, metrics

    def on_round_end(self, run: Any, record: dict[str, Any]) -> None:
        self._count(record)
        if not self.updates:
            self.note(Moment(record["round"], run.arrays, record["virtual_s"], record, self))

    def count_until(self, now_s: float) -> None:
        """Count what was spent in a round that has not ended."""
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
    **more: Any,
) -> Watch:
    """Train on a grid until the note has enough; ``more`` is for ``Strategy.start``."""
    # Flower draws the nodes of a round from this generator.
    random.seed(seed)
    watch = Watch(strategy, note, updates=updates)
    # The note ends the run from within a hook, so that nothing more is sent.
    with suppress(Enough):
        watch.start(grid, arrays, rounds, **more)
    return watch


def emulate(
    app: ClientApp,
    settings: tasks.Settings,
    strategy: Strategy,
    profiles: Sequence[DeviceProfile],
    run_config: dict[str, Any],
    *,
    note: Callable[[Moment], dict[str, Any]] = lambda moment: {},
    every: int = 1,
    measure: Measure | None = None,
) -> Columns:
    """Train what the apps train, and return a curve with a point for each measurement.

    The global model is measured every so many rounds or server updates and after the last one, and
    ``note`` adds to a point.
    """
    rounds = settings.num_server_rounds
    measure = measure or tasks.central_evaluate(settings)
    points: list[dict[str, Any]] = []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        # Measuring takes no virtual time.
        return measure(number, arrays) if number % every == 0 or number == rounds else None

    def add(moment: Moment) -> None:
        more = note(moment)
        measured = moment.record["global"]
        if measured:
            point = {"round": moment.round, "virtual_s": moment.virtual_s}
            point |= {"accuracy": measured["accuracy"], "bytes": moment.watch.bytes}
            points.append(point | {"device_s": moment.watch.device_s} | more)

    grid = LocalGrid(app, profiles, seed=settings.seed, run_config=run_config)
    first = tasks.initial_arrays(settings)
    drive(strategy, grid, first, add, seed=settings.seed, rounds=rounds, evaluate_fn=evaluate)
    return rounded(columns(points))


def config_of(
    dataset: str, partition: str, rate: float, seed: int, rounds: int = ENDLESS
) -> dict[str, Any]:
    """Return the run-config of an app's plain training in batches of 16."""
    config = {"dataset": dataset, "partition": partition, "learning-rate": rate, "seed": seed}
    return config | {"num-server-rounds": rounds, "batch-size": 16}


def with_last_classes(settings: tasks.Settings, count: int) -> Measure:
    """Return a function for accuracy on all test examples, and on the last classes as ``slow``."""
    test = tasks.load_test(settings.dataset)
    shape = tasks.data_shape(settings.dataset)
    # The partition classes-by-speed gives these classes to the slowest nodes.
    slow = test.targets > test.targets.max() - count

    @torch.inference_mode()
    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = tasks.model_from(arrays.to_torch_state_dict(), settings.model, *shape).eval()
        found = torch.cat([model(part).argmax(1) for part in torch.split(test.inputs, 500)])
        right = (found == test.targets).float()
        return MetricRecord({"accuracy": float(right.mean()), "slow": float(right[slow].mean())})

    return evaluate

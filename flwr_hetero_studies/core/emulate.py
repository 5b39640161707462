"""Train on an emulated fleet in this process, and note a curve."""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import Wrapper
from flwr_hetero_studies.tasks import (
    Settings,
    central_evaluate,
    data_shape,
    initial_arrays,
    load_test,
    model_from,
)

Point = dict[str, Any]
Note = Callable[[dict[str, Any]], Point]
Measure = Callable[[int, ArrayRecord], MetricRecord]


class Enough(Exception):
    """Ends a run before its last round."""


class Curve(Wrapper):
    """Note a point after each round in which the global model was measured."""

    def __init__(self, strategy: Strategy, note: Note, budget_s: float, charged: bool) -> None:
        super().__init__(strategy)
        self.note, self.budget_s, self.charged = note, budget_s, charged
        self.points: list[Point] = []
        self.bytes, self.device_s = 0, 0.0

    def on_round_end(self, run: Any, record: dict[str, Any]) -> None:
        """Add a point; end the run with the first round after the budget."""
        self.bytes += record["bytes_down"] + record["bytes_up"]
        self.device_s += record["device_s"]
        more = self.note(record)
        if record["global"]:
            point = {"round": record["round"], "virtual_s": record["virtual_s"]}
            point |= {"accuracy": record["global"]["accuracy"], "bytes": self.bytes}
            self.points.append(point | {"device_s": self.device_s} | more)
        free_s = 0.0 if self.charged else self.points[0]["virtual_s"]
        if record["virtual_s"] - free_s > self.budget_s:
            raise Enough


def emulate(
    app: ClientApp,
    settings: Settings,
    strategy: Strategy,
    profiles: Sequence[DeviceProfile],
    run_config: dict[str, Any],
    *,
    note: Note = lambda record: {},
    budget_s: float = inf,
    charged: bool = True,
    every: int = 1,
    arrays: ArrayRecord | None = None,
    train_config: dict[str, Any] | None = None,
    measure: Measure | None = None,
) -> dict[str, list[Any]]:
    """Train, and return the curve by columns.

    The global model is measured every so many rounds or merges and after the last. The run ends
    with the first round after ``budget_s`` of virtual time; profiling counts if it is ``charged``.
    """
    measure, rounds = measure or central_evaluate(settings), settings.num_server_rounds

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        return measure(number, arrays) if number % every == 0 or number == rounds else None

    random.seed(settings.seed)  # Flower draws the nodes of a round from it
    curve = Curve(strategy, note, budget_s, charged)
    grid = LocalGrid(app, profiles, seed=settings.seed, run_config=run_config)
    with suppress(Enough):
        curve.start(
            grid,
            initial_arrays(settings) if arrays is None else arrays,
            rounds,
            train_config=ConfigRecord(train_config or {}),
            evaluate_fn=evaluate,
        )
    return columns(curve.points)


def with_last_classes(settings: Settings, count: int) -> Measure:
    """Measure all test examples, and as ``slow`` those of the last classes."""
    test, shape = load_test(settings.dataset), data_shape(settings.dataset)
    slow = test.targets > test.targets.max() - count

    @torch.inference_mode()
    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = model_from(arrays.to_torch_state_dict(), settings.model, *shape).eval()
        found = torch.cat([model(part).argmax(1) for part in torch.split(test.inputs, 500)])
        right = (found == test.targets).float()
        return MetricRecord({"accuracy": float(right.mean()), "slow": float(right[slow].mean())})

    return evaluate


def columns(points: list[Point]) -> dict[str, list[Any]]:
    """Turn points into columns; figures with five places, None where a point has none."""
    names = dict.fromkeys(name for point in points for name in point)
    return {
        name: [round(v, 5) if isinstance(v := p.get(name), float) else v for p in points]
        for name in names
    }

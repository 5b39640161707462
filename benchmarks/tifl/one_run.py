"""One training run on an emulated fleet, shared by the benchmarks of this folder."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flwr_hetero.client.device import DeviceProfile
from flwr_hetero.fleet import LocalGrid
from flwr_hetero.strategy import TiFL
from flwr_hetero.task.node import evaluate_node, profile_node, train_node
from flwr_hetero.task.run import central_evaluate, initial_arrays
from flwr_hetero.task.settings import Settings


class Enough(Exception):
    """Ends a run before its last round."""


def make_app() -> ClientApp:
    """Make the nodes: those of our apps."""
    app = ClientApp()
    app.train()(train_node)
    app.train("profile")(profile_node)
    app.evaluate()(evaluate_node)
    return app


def one_run(
    run_config: dict[str, Any],
    profiles: Sequence[DeviceProfile],
    budget_s: float = float("inf"),
    **tifl: Any,
) -> dict[str, Any]:
    """Train with TiFL around FedAvg and return clock and test accuracy after each round.

    Times are virtual seconds since training began; ``profiling_s`` comes on top. Vanilla
    selection needs no profiling and is not charged for it. A run ends after its last round, or
    with the first round after ``budget_s``.
    """
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    settings = Settings.from_run_config(run_config)
    strategy = TiFL(FedAvg(fraction_evaluate=0.0), seed=settings.seed, **tifl)
    measure = central_evaluate(settings)
    clock_s: list[float] = []
    accuracy: list[float] = []
    tiers: list[int | None] = []

    def after_round(number: int, arrays: ArrayRecord) -> MetricRecord:
        metrics = measure(number, arrays)
        clock_s.append(strategy.session.virtual_s)
        accuracy.append(float(metrics["accuracy"]))
        tiers.append(strategy.current_tier)
        if clock_s[-1] - clock_s[0] > budget_s:
            raise Enough
        return metrics

    grid = LocalGrid(make_app(), profiles, seed=settings.seed, run_config=run_config)
    with suppress(Enough):
        strategy.start(
            grid,
            initial_arrays(settings),
            num_rounds=settings.num_server_rounds,
            evaluate_fn=after_round,
        )
    table = strategy.table
    return {
        "seed": settings.seed,
        "profiling_s": 0.0 if tifl.get("policy") == "vanilla" else clock_s[0],
        "clock_s": [round(time_s - clock_s[0], 4) for time_s in clock_s],
        "accuracy": [round(figure, 4) for figure in accuracy],
        "tier": tiers[1:],
        "tier_sizes": [len(members) for members in table.members] if table else [],
        **strategy.estimate.as_dict(),
    }

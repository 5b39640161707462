"""What a server needs: strategies of Flower, a first model, central evaluation, a run."""

import random
from collections.abc import Callable
from dataclasses import asdict
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower

from flwr_hetero._flwr import log
from flwr_hetero.report import RunDirectory
from flwr_hetero.server.loop import Run
from flwr_hetero.strategy import Recorded, Wrapper
from flwr_hetero_studies.tasks.data import load_test
from flwr_hetero_studies.tasks.models import make_model, model_from
from flwr_hetero_studies.tasks.settings import Settings
from flwr_hetero_studies.tasks.training import evaluate

INNER: dict[str, tuple[type[flower.FedAvg], dict[str, float]]] = {
    "fedavg": (flower.FedAvg, {}), "fedadam": (flower.FedAdam, {}),
    "fedavgm": (flower.FedAvgM, {"server_momentum": 0.9}),
    "fedprox": (flower.FedProx, {"proximal_mu": 0.1}),
    "fedmedian": (flower.FedMedian, {}), "fedtrimmedavg": (flower.FedTrimmedAvg, {}),
}  # fmt: skip
"""Strategies of Flower, with values for settings that have no default."""


def inner_strategy(name: str, settings: Settings, **more: Any) -> flower.FedAvg:
    kind, given = INNER[name]
    if kind is flower.FedProx and settings.proximal_mu:
        given = {"proximal_mu": settings.proximal_mu}
    arguments: dict[str, Any] = {"fraction_evaluate": 0.0, **given, **more}
    return kind(**arguments)


def initial_arrays(settings: Settings) -> ArrayRecord:
    return ArrayRecord(make_model(settings.model, *settings.shape, settings.seed).state_dict())


def central_evaluate(settings: Settings) -> Callable[[int, ArrayRecord], MetricRecord]:
    test = load_test(settings.dataset, settings.task)
    # The server need not have the nodes' device.
    device = "auto" if settings.device.startswith("cuda") else settings.device

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = model_from(arrays.to_torch_state_dict(), settings.model, *settings.shape)
        loss, accuracy = evaluate(model, test, device=device)
        more = test.task.metrics(loss, accuracy)
        return MetricRecord({"loss": loss, "accuracy": accuracy, **more})

    return evaluate_fn


class StopEarly(Wrapper):
    """End a run at its target accuracy, or when it has used up its time on the fleet's clock."""

    name = "stop-early"

    def __init__(self, strategy: flower.Strategy, settings: Settings) -> None:
        super().__init__(strategy)
        self.target = settings.target_accuracy
        self.budget_s = settings.time_budget_s
        self.was_reached = False

    def on_round_end(self, run: Run, record: dict[str, Any]) -> None:
        accuracy = record["global"].get("accuracy")
        clock_s = record["virtual_s"]
        is_reached = self.target > 0 and accuracy is not None and accuracy >= self.target
        was_reached = self.was_reached
        if accuracy is not None:
            self.was_reached = is_reached
        # A single evaluation may be luck.
        if is_reached and was_reached:
            why = f"accuracy {accuracy:.4g} has reached target-accuracy {self.target:g}"
        elif self.budget_s and clock_s >= self.budget_s:
            why = f"{clock_s:.4g} s have used up time-budget-s {self.budget_s:g}"
        else:
            return
        self.fleet.stop_reason = record["stopped"] = why


def run_app(
    app: str,
    settings: Settings,
    strategy: flower.Strategy,
    grid: Grid,
    train_config: ConfigRecord | None = None,
) -> Path:
    folder = settings.run_directory(app)
    resume = settings.resume
    run_dir = RunDirectory(folder, asdict(settings), resume=resume, argument="output-dir")
    # Data or model may be refused, so open them before any node is asked.
    measure = central_evaluate(settings)
    arrays = initial_arrays(settings)
    last = settings.num_server_rounds

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        is_due = server_round % settings.evaluate_every == 0
        return measure(server_round, arrays) if is_due or server_round == last else None

    # Flower's strategies draw nodes from this generator.
    random.seed(settings.seed)
    if settings.target_accuracy or settings.time_budget_s:
        strategy = StopEarly(strategy, settings)
    recorded = Recorded(strategy, run_dir=run_dir, resume=resume, trackers=settings.tracker_names)
    recorded.start(grid, arrays, last, train_config=train_config, evaluate_fn=evaluate_fn)
    log(INFO, "Results: %s", run_dir.path / "report.html")
    return run_dir.path

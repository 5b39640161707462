"""What the server of our apps needs besides a strategy: a first model and a test of it."""

import random
from collections.abc import Callable
from dataclasses import asdict
from logging import INFO
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero._flwr import log
from flwr_hetero.report import RunDirectory
from flwr_hetero.strategy import Recorded
from flwr_hetero.task.data import data_shape, load_test
from flwr_hetero.task.models import make_model, model_from
from flwr_hetero.task.settings import Settings
from flwr_hetero.task.training import evaluate


def initial_arrays(settings: Settings) -> ArrayRecord:
    """Draw the initial global model."""
    model = make_model(settings.model, *data_shape(settings.dataset), settings.seed)
    return ArrayRecord(model.state_dict())


def central_evaluate(settings: Settings) -> Callable[[int, ArrayRecord], MetricRecord]:
    """Make the function that measures the global model on the test examples after each round."""
    test, shape = load_test(settings.dataset), data_shape(settings.dataset)

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = model_from(arrays.to_torch_state_dict(), settings.model, *shape)
        loss, accuracy = evaluate(model, test, device="auto")
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    return evaluate_fn


def run_app(
    app: str,
    settings: Settings,
    strategy: Strategy,
    grid: Grid,
    train_config: ConfigRecord | None = None,
) -> Path:
    """Run a strategy on the fleet and record it; return the run directory.

    Notes
    -----
    Seeds Python's own generator, with which Flower's strategies select nodes.
    """
    run_dir = RunDirectory(settings.run_directory(app), asdict(settings), resume=settings.resume)
    evaluate_fn, arrays = central_evaluate(settings), initial_arrays(settings)
    random.seed(settings.seed)
    recorded = Recorded(strategy, run_dir=run_dir, resume=settings.resume)
    recorded.start(
        grid,
        arrays,
        settings.num_server_rounds,
        train_config=train_config,
        evaluate_fn=evaluate_fn,
    )
    log(INFO, "Results: %s", run_dir.path / "report.html")
    return run_dir.path

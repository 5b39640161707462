"""Run a strategy for an app; apart, so that nodes need not load what draws the report."""

import random
from dataclasses import asdict
from logging import INFO
from pathlib import Path

from flwr.app import ConfigRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero.report import RunDirectory
from flwr_hetero.strategy import Recorded
from flwr_hetero.task.server import central_evaluate, initial_arrays
from flwr_hetero.task.settings import Settings


def run_app(
    app: str,
    settings: Settings,
    strategy: Strategy,
    grid: Grid,
    train_config: ConfigRecord | None = None,
) -> Path:
    """Run a strategy on the fleet, record it, and say where the results are.

    Parameters
    ----------
    app : str
        Name of the app, for the run directory.
    settings : Settings
        The run-config.
    strategy : Strategy
        Made from it.
    grid : Grid
        The fleet.
    train_config : ConfigRecord, optional
        As for the strategy's ``start``.

    Returns
    -------
    Path
        The run directory.

    Raises
    ------
    ValueError
        If the data set cannot be read, or there is nothing to resume from.

    Notes
    -----
    Seeds Python's own generator, with which Flower's strategies select nodes.
    """
    evaluate_fn, arrays = central_evaluate(settings), initial_arrays(settings)
    random.seed(settings.seed)
    run_dir = RunDirectory(settings.run_directory(app), asdict(settings), resume=settings.resume)
    Recorded(strategy, run_dir=run_dir, resume=settings.resume).start(
        grid,
        arrays,
        settings.num_server_rounds,
        train_config=train_config,
        evaluate_fn=evaluate_fn,
    )
    log(INFO, "Results: %s", run_dir.path / "report.html")
    return run_dir.path

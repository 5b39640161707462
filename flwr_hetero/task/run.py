"""Run a strategy for an app; apart, so that nodes need not load what draws the report."""

import random
from dataclasses import asdict
from logging import INFO
from pathlib import Path

from flwr.app import ConfigRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero.core.errors import invalid
from flwr_hetero.report import RunDirectory
from flwr_hetero.report.files import CONFIG
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
        If the data set cannot be read, or there is no run to resume in ``output-dir``.

    Notes
    -----
    Seeds Python's own generator, with which Flower's strategies select nodes. A run that was
    stopped before its first checkpoint is resumed from its beginning.
    """
    if settings.resume:
        _check_resumable(settings.output_dir)
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


def _check_resumable(output_dir: str) -> None:
    """Refuse to begin a new run where one was to be continued, as after a mistyped path."""
    if not (Path(output_dir).expanduser() / CONFIG).is_file():
        cure = "correct the path, or leave resume out to begin a run there"
        raise invalid("output-dir", output_dir, "hold the run to resume", cure)

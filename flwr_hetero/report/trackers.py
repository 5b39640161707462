"""TensorBoard, MLflow and Weights & Biases: what a recorded run also tells them, each round."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flwr_hetero.errors import check_choice, install_hint
from flwr_hetero.report.history import read_config

# How to add a round's figures, and how to end the run, through the client of a system.
Tracker = tuple[Callable[[int, Mapping[str, float]], object], Callable[[], object]]
logger = logging.getLogger("flwr")
# Experiment of MLflow, project of Weights & Biases.
PROJECT = "flwr-hetero"
# Parts of a record that are no figures of the whole run.
SKIPPED = ("round", "latency", "weights", "fairness")


def check_trackers(names: Sequence[str]) -> list[str]:
    """Refuse a tracker that is not known, or not installed."""
    for name in names:
        check_choice("trackers", name, TRACKERS)
        if find_spec(name) is None:
            hint = install_hint("trackers")
            raise ModuleNotFoundError(f"trackers: {name} is not installed: {hint}", name=name)
    return list(names)


def figures_of(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Return the numbers of a round: ``virtual_s``, ``global/accuracy``, ``tifl/tier``, ...

    >>> record = {"round": 3, "virtual_s": 2.5, "global": {"accuracy": 0.5}, "failures": ["x"]}
    >>> dict(figures_of(record))
    {'virtual_s': 2.5, 'global/accuracy': 0.5, 'failures': 1.0}
    """
    for key, value in (record | {"failures": len(record["failures"])}).items():
        for name, number in value.items() if isinstance(value, dict) else [("", value)]:
            if type(number) in (int, float) and key not in SKIPPED:
                yield f"{key}/{name}" if name else key, float(number)


class Trackers:
    """Pass rounds on; a tracker that fails is left out from then on and never ends the run."""

    def __init__(self) -> None:
        self._open: dict[str, Tracker] = {}

    def open(self, names: Sequence[str], checkpoint_dir: Path) -> None:
        """Begin or continue a run in each; the run directory is that of the checkpoint."""
        for name in names:
            if tracker := self._try(name, partial(TRACKERS[name], checkpoint_dir.parent)):
                self._open[name] = tracker

    def log(self, record: dict[str, Any]) -> None:
        """Pass on a round's record."""
        for name, (log, _) in list(self._open.items()):
            self._try(name, partial(log, record["round"], dict(figures_of(record))))

    def close(self) -> None:
        """End the run everywhere."""
        for name, (_, close) in list(self._open.items()):
            self._try(name, close)
        self._open.clear()

    def _try(self, name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            self._open.pop(name, None)
            logger.warning("%s gets no more of this run: %s: %s", name, type(error).__name__, error)


def tensorboard(folder: Path) -> Tracker:
    """Write event files, for ``tensorboard --logdir RUNS``, into the run directory."""
    from tensorboard.summary import Writer

    writer = Writer(str(folder / "tensorboard"))

    def log(step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def mlflow(folder: Path) -> Tracker:
    """Continue this directory's run at ``MLFLOW_TRACKING_URI``, else in ``mlflow.db``."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
    client = MlflowClient(uri)
    known = client.get_experiment_by_name(PROJECT)
    experiment = known.experiment_id if known else client.create_experiment(PROJECT)
    before = client.search_runs([experiment], f"tags.`run-directory` = '{folder}'", max_results=1)
    tags = {"run-directory": str(folder)}
    found = before[0] if before else client.create_run(experiment, run_name=folder.name, tags=tags)
    run = found.info.run_id
    for key, value in () if before else _settings(folder).items():
        client.log_param(run, key, value)

    def log(step: int, figures: Mapping[str, float]) -> None:
        now_ms = int(1000 * time.time())
        metrics = [Metric(name, value, now_ms, step) for name, value in figures.items()]
        client.log_batch(run, metrics)

    return log, partial(client.set_terminated, run)


def wandb(folder: Path) -> Tracker:
    """Continue this directory's run by ``WANDB_MODE``, else offline where nobody is logged in."""
    import wandb as client

    mode: Any = os.environ.get("WANDB_MODE") or ("online" if client.api.api_key else "offline")
    run = client.init(
        project=PROJECT,
        name=folder.name,
        # Of this directory, so that a resume continues it.
        id=sha256(str(folder).encode()).hexdigest()[:16],
        resume="allow",
        dir=str(folder),
        config=_settings(folder),
        mode=mode,
        settings=client.Settings(silent=True),
    )
    return lambda step, figures: run.log(dict(figures), step=step), run.finish


def _settings(folder: Path) -> dict[str, Any]:
    """Return a run's settings, without secrets, from its directory."""
    return dict(read_config(folder).get("settings") or {})


TRACKERS = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}

"""TensorBoard, MLflow and Weights & Biases: what a recorded run also tells them, each round."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from flwr_hetero.errors import check_choice, install_hint
from flwr_hetero.report.history import read_config

logger = logging.getLogger("flwr")
PROJECT = "flwr-hetero"
"""Experiment of MLflow, project of Weights & Biases."""
PACKAGES = {"mlflow": ("mlflow-skinny", "sqlalchemy")}
"""What is to be installed where that is not called as the tracker is."""
SKIPPED = ("round", "latency", "weights", "fairness")
"""Parts of a record that are no figures of the whole run."""
Figures = Mapping[str, float]


class Tracker(Protocol):
    """Where figures go, through the client of that system."""

    def log(self, step: int, figures: Figures) -> None:
        """Add the figures of a round."""

    def close(self) -> None:
        """End the run there."""


def check_trackers(names: Sequence[str]) -> list[str]:
    """Refuse a tracker that is not known, or not installed."""
    for name in names:
        check_choice("trackers", name, TRACKERS)
        if find_spec(name) is None:
            hint = install_hint("trackers", *PACKAGES.get(name, (name,)))
            raise ModuleNotFoundError(f"trackers: {name} is not installed: {hint}", name=name)
    return list(names)


def figures_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a round: ``virtual_s``, ``global/accuracy``, ``tifl/tier``, ...

    >>> figures_of({"round": 3, "virtual_s": 2.5, "global": {"accuracy": 0.5}, "failures": ["x"]})
    {'virtual_s': 2.5, 'global/accuracy': 0.5, 'failures': 1.0}
    """
    return dict(_numbers(record))


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if key in SKIPPED:
            continue
        if key == "failures":
            yield key, float(len(value))
        for name, number in value.items() if isinstance(value, dict) else [("", value)]:
            if isinstance(number, int | float) and not isinstance(number, bool):
                yield f"{key}/{name}" if name else key, float(number)


class Trackers:
    """Pass rounds on; a tracker that fails is left out from then on and never ends the run."""

    def __init__(self) -> None:
        self._open: dict[str, Tracker] = {}

    def open(self, names: Sequence[str], checkpoint_dir: Path) -> None:
        """Begin, or go on with, a run in each; the run directory is that of the checkpoint."""
        for name in names:
            self._try(name, partial(self._begin, name, checkpoint_dir.parent))

    def _begin(self, name: str, folder: Path) -> None:
        self._open[name] = TRACKERS[name](folder)

    def log(self, record: Mapping[str, Any]) -> None:
        """Pass on a round's record."""
        figures = figures_of(record) if self._open else {}
        for name, tracker in list(self._open.items()):
            self._try(name, partial(tracker.log, record["round"], figures))

    def close(self) -> None:
        """End the run everywhere."""
        for name, tracker in list(self._open.items()):
            self._try(name, tracker.close)
        self._open.clear()

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._open.pop(name, None)
            logger.warning("%s gets no more of this run: %s: %s", name, type(error).__name__, error)


class TensorBoard:
    """Event files in ``tensorboard`` in the run directory: ``tensorboard --logdir RUNS``."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(folder / "tensorboard"))

    def log(self, step: int, figures: Figures) -> None:
        """Add the figures of a round."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class MLflow:
    """A run in ``MLFLOW_TRACKING_URI``, else in ``mlflow.db`` in the run directory.

    A resumed run goes on in the run of the same directory.
    """

    def __init__(self, folder: Path) -> None:
        from mlflow import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
        self._client = client = MlflowClient(uri)
        known = client.get_experiment_by_name(PROJECT)
        experiment = known.experiment_id if known else client.create_experiment(PROJECT)
        tag = "run-directory"
        found = client.search_runs([experiment], f"tags.`{tag}` = '{folder}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            return
        self._run = client.create_run(
            experiment, run_name=folder.name, tags={tag: str(folder)}
        ).info.run_id
        for key, value in settings_of(folder).items():
            client.log_param(self._run, key, value)

    def log(self, step: int, figures: Figures) -> None:
        """Add the figures of a round."""
        from mlflow.entities import Metric

        now_ms = int(1000 * time.time())
        metrics = [Metric(name, value, now_ms, step) for name, value in figures.items()]
        self._client.log_batch(self._run, metrics)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)


class WandB:
    """A run in the project ``flwr-hetero``; offline in the run directory where nobody is logged in.

    ``WANDB_MODE`` decides where it is set; ``wandb sync`` uploads an offline run.
    """

    def __init__(self, folder: Path) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE")
        mode = mode or ("online" if wandb.api.api_key else "offline")
        self._run = wandb.init(
            project=PROJECT,
            name=folder.name,
            id=sha256(str(folder).encode()).hexdigest()[:16],  # of this directory, also resumed
            resume="allow",
            dir=str(folder),
            config=settings_of(folder),
            mode=mode,
            settings=wandb.Settings(silent=True),
        )

    def log(self, step: int, figures: Figures) -> None:
        """Add the figures of a round."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


def settings_of(folder: Path) -> dict[str, Any]:
    """Return a run's settings, without secrets, from its directory."""
    return dict(read_config(folder).get("settings") or {})


TRACKERS: dict[str, Callable[[Path], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}

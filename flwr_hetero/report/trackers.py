"""TensorBoard, MLflow, Weights & Biases, Prometheus: send the figures of each round there too."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from flwr_hetero.errors import check_choice, install_hint
from flwr_hetero.report.history import read_config
from flwr_hetero.report.prometheus import Endpoint

logger = logging.getLogger("flwr")
# Experiment in MLflow, project in Weights & Biases.
PROJECT = "flwr-hetero"
# Keys of a record that are no figures of the whole run.
SKIPPED = ("round", "latency", "weights", "fairness")


class Tracker(NamedTuple):
    """A run in another system."""

    log: Callable[[int, Mapping[str, float], dict[str, Any]], object]
    """Add a round: its number, the figures of the whole run, and its record."""
    close: Callable[[], object]
    """End the run."""


def check_trackers(names: Sequence[str]) -> list[str]:
    """Refuse a tracker that is unknown (ValueError) or not installed (ModuleNotFoundError)."""
    for name in names:
        check_choice("trackers", name, TRACKERS)
        if find_spec(MODULES.get(name, name)) is None:
            hint = install_hint(name if name in MODULES else "trackers")
            raise ModuleNotFoundError(f"trackers: {name} is not installed: {hint}", name=name)
    return list(names)


def figures_of(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a round: ``virtual_s``, ``global/accuracy``, ``tifl/tier``, ...

    >>> record = {"round": 3, "virtual_s": 2.5, "global": {"accuracy": 0.5}, "failures": ["x"]}
    >>> dict(figures_of(record))
    {'virtual_s': 2.5, 'global/accuracy': 0.5, 'failures': 1.0}
    """
    for key, value in (record | {"failures": len(record["failures"])}).items():
        if key in SKIPPED:
            continue
        for name, number in value.items() if isinstance(value, dict) else [("", value)]:
            if type(number) in (int, float):
                yield f"{key}/{name}" if name else key, float(number)


class Trackers:
    """Send rounds to trackers; one that fails is dropped and never ends the run."""

    def __init__(self) -> None:
        self._open: dict[str, Tracker] = {}

    def open(self, names: Sequence[str], checkpoint_dir: Path) -> None:
        """Begin or continue a run in each tracker; the run directory is the folder above."""
        for name in names:
            tracker = self._try(name, partial(TRACKERS[name], checkpoint_dir.parent))
            if tracker:
                self._open[name] = tracker

    def log(self, record: dict[str, Any]) -> None:
        """Send the record of a round."""
        figures = dict(figures_of(record))
        for name, tracker in list(self._open.items()):
            self._try(name, partial(tracker.log, record["round"], figures, record))

    def close(self) -> None:
        """End the run in each tracker."""
        for name, tracker in list(self._open.items()):
            self._try(name, tracker.close)
        self._open.clear()

    def _try(self, name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            self._open.pop(name, None)
            text = "%s failed and gets no more rounds of this run: %s: %s"
            logger.warning(text, name, type(error).__name__, error)


def tensorboard(folder: Path) -> Tracker:
    """Write event files into the run directory, for ``tensorboard --logdir RUNS``."""
    from tensorboard.summary import Writer

    writer = Writer(str(folder / "tensorboard"))

    def log(step: int, figures: Mapping[str, float], record: dict[str, Any]) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Tracker(log, writer.close)


def mlflow(folder: Path) -> Tracker:
    """Continue this directory's run at ``MLFLOW_TRACKING_URI``, or in its own ``mlflow.db``."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(PROJECT)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(PROJECT)
    filter_string = f"tags.`run-directory` = '{folder}'"
    previous = client.search_runs([experiment_id], filter_string, max_results=1)
    if previous:
        run_id = previous[0].info.run_id
    else:
        tags = {"run-directory": str(folder)}
        run_id = client.create_run(experiment_id, run_name=folder.name, tags=tags).info.run_id
        for key, value in _settings(folder).items():
            client.log_param(run_id, key, value)

    def log(step: int, figures: Mapping[str, float], record: dict[str, Any]) -> None:
        now_ms = int(1000 * time.time())
        metrics = [Metric(name, value, now_ms, step) for name, value in figures.items()]
        client.log_batch(run_id, metrics)

    return Tracker(log, partial(client.set_terminated, run_id))


def wandb(folder: Path) -> Tracker:
    """Continue this directory's run as ``WANDB_MODE`` says, or offline if nobody is logged in."""
    import wandb as client

    mode: Any = os.environ.get("WANDB_MODE") or ("online" if client.api.api_key else "offline")
    run = client.init(
        project=PROJECT,
        name=folder.name,
        # The same directory has the same id, so that a resume continues the run.
        id=sha256(str(folder).encode()).hexdigest()[:16],
        resume="allow",
        dir=str(folder),
        config=_settings(folder),
        mode=mode,
        settings=client.Settings(silent=True),
    )
    return Tracker(lambda step, figures, record: run.log(dict(figures), step=step), run.finish)


def prometheus(folder: Path) -> Tracker:
    """Serve the figures at ``FLWR_HETERO_METRICS``, else at 127.0.0.1:9464, for Prometheus."""
    endpoint = Endpoint(folder)
    return Tracker(lambda step, figures, record: endpoint.log(record), endpoint.close)


def _settings(folder: Path) -> dict[str, Any]:
    """Return a run's settings, without secrets, from its directory."""
    return dict(read_config(folder).get("settings") or {})


TRACKERS = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb, "prometheus": prometheus}
# Trackers whose module has another name; each has an extra of its own.
MODULES = {"prometheus": "prometheus_client"}

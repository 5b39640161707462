"""Keys of the run-config, with checks whose errors name the keys as they are typed."""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import datetime
from logging import WARNING
from math import cos, pi
from pathlib import Path
from typing import Any, Self

from flwr_hetero._flwr import quiet_strategies
from flwr_hetero.client.device import REAL, named_fleet
from flwr_hetero.errors import check_choice, check_count, check_key, check_number, invalid
from flwr_hetero.report.trackers import TRACKERS
from flwr_hetero_studies.tasks.data import data_shape
from flwr_hetero_studies.tasks.kinds import AUTO, Outputs, check_task
from flwr_hetero_studies.tasks.models import check_model
from flwr_hetero_studies.tasks.partitions import check_partition
from flwr_hetero_studies.tasks.training import check_device, check_optimizer

KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
EXPONENTIAL = "exponential"
COSINE = "cosine"
SCHEDULES = (EXPONENTIAL, COSINE)
BOUNDS = {
    "learning_rate": "(0, inf)", "lr_decay": "(0, 1]", "weight_decay": "[0, inf)",
    "proximal_mu": "[0, inf)", "target_accuracy": "[0, 1]", "time_budget_s": "[0, inf)",
}  # fmt: skip
RUNS = "flwr-hetero-runs"
"""Folder in the home directory for runs without an ``output-dir``."""


def key_of(name: str) -> str:
    return name.replace("_", "-")


@dataclass(frozen=True)
class Settings:
    """The shared run-config, which has dashes; an app with more keys derives from it."""

    num_server_rounds: int = 30
    dataset: str = "digits"
    task: str = AUTO
    partition: str = "dirichlet"
    alpha: float = 0.5
    classes_per_node: int = 2
    model: str = "auto"
    fleet: str = "paper-5"
    seed: int = 0
    output_dir: str = ""
    resume: bool = False
    local_epochs: int = 1
    batch_size: int = 16
    learning_rate: float = 0.1
    lr_schedule: str = EXPONENTIAL
    lr_decay: float = 1.0
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal_mu: float = 0.0
    amp: bool = False
    device: str = "auto"
    evaluate_every: int = 1
    target_accuracy: float = 0.0
    time_budget_s: float = 0.0
    trackers: str = ""

    def __post_init__(self) -> None:
        for name in ("num_server_rounds", "local_epochs", "batch_size", "evaluate_every"):
            check_count(key_of(name), getattr(self, name), 1)
        for name, bounds in BOUNDS.items():
            check_number(key_of(name), getattr(self, name), bounds)
        check_optimizer(self.optimizer, self.momentum)
        check_device(self.device)
        for name in self.tracker_names:
            check_choice("trackers", name, TRACKERS, "join several with +")
        self.check_choice("lr_schedule", SCHEDULES)
        if self.lr_schedule == COSINE and self.lr_decay != 1:
            raise invalid("lr-decay", self.lr_decay, f"be 1 with lr-schedule={COSINE!r}")
        check_count("seed", self.seed)
        check_partition(self.partition, self.alpha, self.classes_per_node)
        check_task(self.task)
        check_model(self.model)
        # An unknown fleet is refused here, before any node is asked.
        if self.fleet != REAL:
            named_fleet(self.fleet, num_nodes=1)
        if self.output_dir and not Path(self.output_dir).expanduser().is_absolute():
            rule = "be absolute (a ServerApp has a working directory of its own) or empty"
            raise invalid("output-dir", self.output_dir, rule)
        if self.resume and not self.output_dir:
            raise invalid("output-dir", "", "be given to resume")

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, Any]) -> Self:
        """Read a run-config; a whole number may stand for a number."""
        kinds = {key_of(field.name): type(field.default) for field in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in run_config.items():
            check_key("run-config", key, kinds)
            # TOML writes 1 where 1.0 is meant; a truth value is no number
            typed = float(value) if kinds[key] is float and type(value) is int else value
            if type(typed) is not kinds[key]:
                hint = f"write {key}='{value}'" if kinds[key] is str else ""
                raise invalid(key, value, f"be {KINDS[kinds[key]]}", hint)
            values[key.replace("-", "_")] = typed
        with cls.as_typed():
            return cls(**values)

    @classmethod
    def shared_part(cls, run_config: Mapping[str, Any]) -> Self:
        """Read the keys that this class has, because nodes need not know an app's other keys."""
        known = {key_of(field.name) for field in fields(cls)}
        return cls.from_run_config({k: v for k, v in run_config.items() if k in known})

    @classmethod
    @contextmanager
    def as_typed(cls) -> Iterator[None]:
        """Let errors inside a ``with`` name settings as in the run-config, with dashes."""
        try:
            # Flower warns of choices that the app makes, such as not to evaluate on nodes.
            with quiet_strategies(WARNING):
                yield
        except ValueError as error:
            text = str(error)
            # Errors of the package name arguments, but the user has typed keys.
            for field in fields(cls):
                text = re.sub(rf"\b{field.name}\b", key_of(field.name), text)
            raise ValueError(text) from error

    def check_choice(self, name: str, known: Collection[str]) -> None:
        check_choice(key_of(name), getattr(self, name), known)

    @property
    def tracker_names(self) -> list[str]:
        return self.trackers.split("+") if self.trackers else []

    def lr_in(self, server_round: int) -> float:
        # Profiling comes before round 1 and takes its rate.
        done = max(server_round, 1) - 1
        if self.lr_schedule == COSINE:
            return self.learning_rate * (1 + cos(pi * done / self.num_server_rounds)) / 2
        return float(self.learning_rate * self.lr_decay**done)

    @property
    def partitioning(self) -> dict[str, Any]:
        """Keyword arguments of ``load_partition``."""
        names = ("task", "partition", "alpha", "classes_per_node", "seed")
        return {name: getattr(self, name) for name in names}

    @property
    def shape(self) -> tuple[tuple[int, ...], Outputs]:
        """What a model must fit: the shape of an input, and the outputs."""
        return data_shape(self.dataset, self.task)

    def run_directory(self, app: str) -> Path:
        """Return the folder of this run's files, which is a new one without ``output-dir``."""
        if self.output_dir:
            return Path(self.output_dir).expanduser()
        path = Path.home() / RUNS / f"{app}-{datetime.now():%Y-%m-%d-%H%M%S}"
        try:
            path.mkdir(parents=True)
        except OSError as error:
            rule = f"be given: none can be made in the home directory ({error})"
            raise invalid("output-dir", "", rule) from error
        return path

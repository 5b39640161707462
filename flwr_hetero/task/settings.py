"""Keys of the run-config: their spelling, their types, and errors that name them as typed."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self

from flwr_hetero.client.device import REAL, named_fleet
from flwr_hetero.errors import check_choice, check_count, check_number, invalid
from flwr_hetero.task.models import MODELS
from flwr_hetero.task.partitions import check_partition

_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def key_of(name: str) -> str:
    """Return the run-config's spelling of a setting."""
    return name.replace("_", "-")


def unknown_key(key: str, known: list[str]) -> ValueError:
    """Make the error for an unknown key."""
    close = get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]!r}? Known are " if close else "known are "
    return invalid("run-config", key, "hold known keys only", hint + ", ".join(known))


def typed(key: str, value: Any, kind: type) -> Any:
    """Check a value's type; a whole number is also a number, nothing else is converted."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise invalid(key, value, f"be {_KINDS[kind]}")
    return value


@contextmanager
def keys_as_typed(names: Iterable[str]) -> Iterator[None]:
    """Let errors name settings as the user typed them, with dashes."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        for name in names:
            text = re.sub(rf"\b{name}\b", key_of(name), text)
        raise ValueError(text) from error


RUNS = "flwr-hetero-runs"
"""Folder in the home directory for runs without an ``output-dir``."""


@dataclass(frozen=True)
class Settings:
    """The run-config that all apps share; an app with keys of its own derives from it.

    In the run-config names have dashes: ``num-server-rounds``.
    """

    num_server_rounds: int = 30
    dataset: str = "digits"
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

    def __post_init__(self) -> None:
        for name in ("num_server_rounds", "local_epochs", "batch_size"):
            check_count(key_of(name), getattr(self, name), 1)
        check_number("learning-rate", self.learning_rate, "(0, inf)")
        check_count("seed", self.seed)
        check_partition(self.partition, self.alpha, self.classes_per_node)
        check_choice("model", self.model, ("auto", *MODELS))
        if self.fleet != REAL:
            named_fleet(self.fleet, num_nodes=1)
        if not self.dataset:
            raise invalid("dataset", self.dataset, "be given", "digits needs no download")
        if self.output_dir and not Path(self.output_dir).expanduser().is_absolute():
            rule = "be absolute (a ServerApp has a working directory of its own) or empty"
            raise invalid("output-dir", self.output_dir, rule)
        if self.resume and not self.output_dir:
            raise invalid("output-dir", "", "be given to resume")

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, Any]) -> Self:
        """Read a run-config."""
        kinds = {key_of(field.name): type(field.default) for field in fields(cls)}
        for key in run_config:
            if key not in kinds:
                raise unknown_key(key, sorted(kinds))
        values = {key: typed(key, value, kinds[key]) for key, value in run_config.items()}
        with keys_as_typed(field.name for field in fields(cls)):
            return cls(**{key.replace("-", "_"): value for key, value in values.items()})

    @classmethod
    def shared_part(cls, run_config: Mapping[str, Any]) -> Self:
        """Read the keys that this class knows and pass over an app's own, as a node does."""
        known = {key_of(field.name) for field in fields(cls)}
        return cls.from_run_config({k: v for k, v in run_config.items() if k in known})

    def check_choice(self, name: str, known: Iterable[str]) -> None:
        """Refuse a setting that is not known."""
        check_choice(key_of(name), getattr(self, name), list(known))

    def as_typed(self) -> AbstractContextManager[None]:
        """Let errors inside a ``with`` name settings as in the run-config, with dashes."""
        return keys_as_typed(field.name for field in fields(self))

    @property
    def partitioning(self) -> dict[str, Any]:
        """How examples are partitioned: keyword arguments of ``load_partition``."""
        names = ("partition", "alpha", "classes_per_node", "seed")
        return {name: getattr(self, name) for name in names}

    def run_directory(self, app: str) -> Path:
        """Return the folder of this run's files; without ``output-dir`` a new one."""
        if self.output_dir:
            return Path(self.output_dir).expanduser()
        stamp = datetime.now().strftime("%Y-%m-%d-%H%M%S")
        path, number = Path.home() / RUNS / f"{app}-{stamp}", 1
        while True:
            try:
                path.mkdir(parents=True)
                return path
            except FileExistsError:
                number += 1
                path = path.with_name(f"{app}-{stamp}-{number}")
            except OSError as error:
                rule = f"be given: none can be made in the home directory ({error})"
                raise invalid("output-dir", "", rule) from error

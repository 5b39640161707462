"""Everything of Flower that its reference does not document, in one place.

Tried with flwr 1.41.0 (``tests/test_flwr.py``). With a new version, this file is what to look at.
"""

import logging
import os
import re
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Error, Message, Metadata
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.config import flatten_dict, parse_config_args
from flwr.common.constant import SType
from flwr.common.logger import console_handler, log
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from flwr_hetero.errors import check_choice, invalid

__all__ = [
    "CLIENT_APP_RAISED",
    "NODE_UNAVAILABLE",
    "NUMPY",
    "ClientAppCallable",
    "NodeInfo",
    "Run",
    "app_tables",
    "attributes_of",
    "be_server_task",
    "console_handler",
    "chooses_one_node",
    "clips_on_nodes",
    "format_of_trees",
    "is_simulation_grid",
    "log",
    "parse_run_config",
    "superlink_connection",
    "new_run",
    "only_errors",
    "quiet_strategies",
    "set_message_id",
    "unavailable",
    "trains_trees",
]

TRIED_WITH = "1.41.0"
"""Version of flwr that all of this was tried with."""
CLIENT_APP_RAISED = 2
"""Code of the error reply when a ClientApp raised, also for want of a handler."""
MESSAGE_UNAVAILABLE = 3
"""Code of the error reply for a message that has ended, or is not known."""
NODE_UNAVAILABLE = 5
"""Code of the error reply for a node that went away."""
_STRATEGIES = str(Path("flwr", "serverapp", "strategy"))
"""Folder of Flower whose modules log every round."""
NUMPY = SType.NUMPY
"""Serialisation of an Array: npy without pickle."""


def new_run(run_id: int) -> Run:
    """Make the run information that a Grid must show."""
    return Run.create_empty(run_id=run_id)


def be_server_task(run_id: int, task_id: int, node_id: int) -> int:
    """Set what ``Message(...)`` asks for, unless a ServerApp has it here; return the run's id."""
    if None in (TaskIdentity._run_id, TaskIdentity._task_id, TaskIdentity._node_id):
        TaskIdentity.run_id, TaskIdentity.task_id = run_id, task_id
        TaskIdentity.node_id = node_id
    return TaskIdentity.run_id


def unavailable(message_id: str) -> Message:
    """Make the answer to a request for a reply that there is not, or not any more."""
    own = TaskIdentity.node_id
    metadata = Metadata(
        run_id=TaskIdentity.run_id,
        message_id="",
        src_node_id=own,
        dst_node_id=own,
        reply_to_message_id=message_id,
        group_id="",
        created_at=time.time(),
        ttl=0,
        message_type="system",
    )
    error = Error(MESSAGE_UNAVAILABLE, "no reply within the message's ttl, or collected before")
    return Message(error, metadata=metadata)  # type: ignore[call-overload,no-any-return]


def set_message_id(message: Message, message_id: str) -> None:
    """Give a message its id, as pushing it to a SuperLink does."""
    message.metadata.__dict__["_message_id"] = message_id


def is_simulation_grid(grid: Grid) -> bool:
    """Return whether this is the Grid of Flower's simulation engine."""
    return type(grid).__name__ == "InMemoryGrid"


def trains_trees(strategy: Strategy) -> bool:
    """Return whether models are boosted trees: they grow, and take no gradient steps."""
    return format_of_trees(strategy) is not None


def format_of_trees(strategy: Strategy) -> str | None:
    """Return in which format a strategy reads boosted trees, if it does: "json", or "any"."""
    kinds = [kind.__name__ for kind in type(strategy).__mro__]
    if "FedXgbBagging" in kinds:
        return "json"
    return "any" if any(kind.startswith("FedXgb") for kind in kinds) else None


def chooses_one_node(strategy: Strategy) -> bool:
    """Return whether a strategy has a selection of its own that no view can replace."""
    return any(kind.__name__ == "FedXgbCyclic" for kind in type(strategy).__mro__)


def clips_on_nodes(strategy: Strategy) -> bool:
    """Return whether a strategy adds noise that is right for updates as the nodes clipped them."""
    names = [kind.__name__ for kind in type(strategy).__mro__]
    return any(name.startswith("DifferentialPrivacyClientSide") for name in names)


@contextmanager
def quiet_strategies(most: int = logging.INFO) -> Iterator[None]:
    """Log at DEBUG what Flower's strategies say, up to a level."""

    def lower(record: logging.LogRecord) -> bool:
        if record.levelno <= most and _STRATEGIES in record.pathname:
            record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
        return True

    logger = logging.getLogger("flwr")
    logger.addFilter(lower)
    try:
        yield
    finally:
        logger.removeFilter(lower)


@contextmanager
def only_errors() -> Iterator[None]:
    """Log errors alone."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def attributes_of(strategy: Strategy) -> dict[str, Any]:
    """Return all attributes of a strategy; Flower's have no other way to show their settings."""
    return vars(strategy)


def app_tables(app: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the components of an app, and its run-config with the values it has by default."""
    path = app / "pyproject.toml"
    if not path.is_file():
        raise invalid("app", str(app), "be a folder with a pyproject.toml")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
        return tables["components"], flatten_dict(tables.get("config", {}))
    except (KeyError, tomllib.TOMLDecodeError) as error:
        raise invalid("app", str(app), f"be a Flower app ({path}: {error!r})") from error


def parse_run_config(given: Sequence[str]) -> dict[str, Any]:
    """Read ``--run-config`` as Flower does, and refuse words that it would pass over."""
    for text in given:
        rest = re.sub(r"(\S+?)=('[^']*'|\"[^\"]*\"|\S+)", "", text).strip()
        if rest and not text.endswith(".toml"):
            raise invalid("--run-config", rest, "be of key=value without blanks around =")
    try:
        return parse_config_args(list(given))
    except Exception as error:  # of the command line library
        hint = "texts need quotes, as in \"policy='vanilla' num-tiers=3\""
        raise invalid("--run-config", " ".join(given), "be of key=value in TOML", hint) from error


def superlink_connection(name: str) -> dict[str, Any]:
    """Return a connection of Flower's configuration file: address, root-certificates, ..."""
    path = Path(os.environ.get("FLWR_HOME", "~/.flwr")).expanduser() / "config.toml"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    known = tomllib.loads(text).get("superlink", {})
    names = [key for key, value in known.items() if isinstance(value, dict)]
    check_choice("superlink", name, names, f"connections are in {path}")
    return dict(known[name])

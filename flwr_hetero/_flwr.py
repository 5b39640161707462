"""Everything of Flower that its reference does not document, in one place.

Tried with flwr 1.41.0 (``tests/test_flwr.py``). With a new version, this file is what to look at.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flwr.app import Error, Message, Metadata
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import SType
from flwr.common.logger import log
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

__all__ = [
    "CLIENT_APP_RAISED",
    "NODE_UNAVAILABLE",
    "NUMPY",
    "ClientAppCallable",
    "NodeInfo",
    "Run",
    "attributes_of",
    "be_server_task",
    "chooses_one_node",
    "format_of_trees",
    "is_simulation_grid",
    "log",
    "new_run",
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
_CHATTY = {"fedavg", "strategy", "strategy_utils"}
"""Modules of Flower that log every round."""
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


@contextmanager
def quiet_strategies() -> Iterator[None]:
    """Keep Flower's strategies from logging each configuration and aggregation."""

    def says_more(record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or record.module not in _CHATTY

    logger = logging.getLogger("flwr")
    logger.addFilter(says_more)
    try:
        yield
    finally:
        logger.removeFilter(says_more)


def attributes_of(strategy: Strategy) -> dict[str, Any]:
    """Return all attributes of a strategy; Flower's have no other way to show their settings."""
    return vars(strategy)

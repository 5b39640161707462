"""Everything of Flower that its reference does not document, in one place.

Tried with flwr 1.42.0 (``tests/test_flwr.py``). With a new version, this file is what to look at.
"""

import logging
import re
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from importlib import import_module
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import flwr
from flwr.app import ArrayRecord, Error, Message, Metadata, RecordDict
from flwr.clientapp.typing import ClientAppCallable as ClientAppCallable
from flwr.common.config import flatten_dict, parse_config_args
from flwr.common.constant import SType
from flwr.common.logger import log as log
from flwr.proto.node_pb2 import NodeInfo as NodeInfo
from flwr.serverapp import Grid
from flwr.serverapp import strategy as serverapp_strategy
from flwr.serverapp.strategy import Strategy
from flwr.supercore.run import Run as Run
from flwr.supercore.task_identity import TaskIdentity

from flwr_hetero.errors import invalid

VERSION: str = flwr.__version__
"""Version of flwr that is installed. The distribution of a nightly build has another name."""
TRIED_WITH = "1.42.0"
"""Version of flwr that all of this was tried with."""
CLIENT_APP_RAISED, MESSAGE_UNAVAILABLE, NODE_UNAVAILABLE = 2, 3, 5
"""Codes of error replies: an app raised or has no handler, a message has ended, a node is away."""
PULL_AGAIN_S = 0.02
"""Seconds before a part of a message is asked for again; then twice as many each time."""
NUMPY = SType.NUMPY
"""Serialisation of an Array: npy without pickle."""


def new_run(run_id: int) -> Run:
    """Make the run information that a Grid must show."""
    return Run.create_empty(run_id=run_id)


def be_server_task(run_id: int, task_id: int, node_id: int) -> int:
    """Set what ``Message(...)`` asks for, unless a ServerApp has it here; return the run's id."""
    if None in (TaskIdentity._run_id, TaskIdentity._task_id, TaskIdentity._node_id):
        TaskIdentity.run_id = run_id
        TaskIdentity.task_id = task_id
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


def set_entries(record: Any, entries: Mapping[str, Any]) -> None:
    """Set entries of a record whose types are right, without Flower's checks, which take 4 us each.

    >>> from flwr.app import ConfigRecord
    >>> set_entries(config := ConfigRecord(), {"seed": 1})
    >>> config["seed"]
    1
    """
    record.__dict__["_data"].update(entries)


def pull_quickly() -> None:
    """Ask for a part of a message again soon, if it is on its way: Flower waits for a second."""
    parts = import_module("flwr.supercore.inflatable.inflatable_utils")
    for function in (parts.pull_objects, parts.pull_and_inflate_object_from_tree):
        function.__kwdefaults__["initial_backoff"] = PULL_AGAIN_S


def is_message_process() -> bool:
    """Return whether this process is Flower's for one message, which ends with it."""
    return "".join(sys.argv[:1]).endswith("flwr-clientapp")


def is_simulation_grid(grid: Grid) -> bool:
    """Return whether this is the Grid of Flower's simulation engine, or one around it."""
    if type(grid).__name__ == "InMemoryGrid":
        return True
    inner = getattr(grid, "grid", None)
    return isinstance(inner, Grid) and is_simulation_grid(inner)


# --- the older API: fit and evaluate of a NumPyClient ----------------------------------------
_OLDER_REPLY = {"train": "fitres", "evaluate": "evaluateres"}
OLDER_OK = 0
"""Status of a client that has done what it was asked."""


class OlderReply(NamedTuple):
    """What ``fit`` or ``evaluate`` returned."""

    status: int
    message: str
    tensors: list[bytes]
    tensor_type: str
    loss: float
    num_examples: int
    metrics: dict[str, Any]


def older_content(category: str, arrays: ArrayRecord, config: dict[str, Any]) -> RecordDict:
    """Write what a client's ``fit`` ("train") or ``evaluate`` is called with."""
    convert = import_module("flwr.compat.common.recorddict_compat")
    kinds = import_module("flwr.compat.common.typing")
    parameters = convert.arrayrecord_to_parameters(arrays, keep_input=True)
    if category == "train":
        write = convert.fitins_to_recorddict
        kind = kinds.FitIns
    else:
        write = convert.evaluateins_to_recorddict
        kind = kinds.EvaluateIns
    return write(kind(parameters, config), keep_input=True)  # type: ignore[no-any-return]


def older_metrics(content: RecordDict) -> dict[str, Any]:
    """Return the metrics of a reply of the older API by today's names; of others none."""
    found: dict[str, Any] = {}
    for kind in _OLDER_REPLY.values():
        count: Any = content.get(f"{kind}.num_examples")
        if count is not None:
            metrics: Any = content.get(f"{kind}.metrics", {})
            found |= {"num-examples": count["num_examples"], **metrics}
    return found


def is_older_reply(content: RecordDict, category: str) -> bool:
    """Return whether a client of the older API wrote a reply."""
    return f"{_OLDER_REPLY[category]}.status" in content


def read_older(content: RecordDict, category: str) -> OlderReply:
    """Read what a client's ``fit`` ("train") or ``evaluate`` returned."""
    convert = import_module("flwr.compat.common.recorddict_compat")
    if category == "train":
        found = convert.recorddict_to_fitres(content, keep_input=True)
        tensors = found.parameters.tensors
        tensor_type = found.parameters.tensor_type
        loss = nan
    else:
        found = convert.recorddict_to_evaluateres(content)
        tensors = []
        tensor_type = ""
        loss = found.loss
    status = found.status.code.value, found.status.message
    return OlderReply(*status, tensors, tensor_type, loss, found.num_examples, found.metrics)


# --- strategies ------------------------------------------------------------------------------
def copy_of(strategy: Any) -> Strategy:
    """Copy a strategy of Flower's, and the one inside it, so that the user's never changes.

    Lists, dictionaries and sets are copied too. Other values are shared, such as a privacy
    accountant, which the user reads after the run. A wrapper of this package is not copied. An
    object that is not a strategy is refused, with the new name of a strategy of the older API.
    """
    given = check_strategy(strategy)
    if hasattr(given, "wrappers"):
        return given
    copied = copy(given)
    for name, value in vars(copied).items():
        if isinstance(value, dict | list | set):
            vars(copied)[name] = copy(value)
        elif isinstance(value, Strategy):
            vars(copied)[name] = copy_of(value)
        elif getattr(value, "__self__", None) is given:
            # A method of the strategy, given as a function such as train_metrics_aggr_fn.
            vars(copied)[name] = value.__func__.__get__(copied)
    return copied


def check_strategy(strategy: Any) -> Strategy:
    """Refuse what is no strategy; say of one of the older API what it is called today."""
    if isinstance(strategy, Strategy):
        return strategy
    hint = "give an instance, for example FedAvg()"
    kind = strategy if isinstance(strategy, type) else type(strategy)
    older = [k.__name__ for k in kind.__mro__ if k.__module__.startswith("flwr.server.strategy")]
    if older:
        own = next((name for name in older if hasattr(serverapp_strategy, name)), "Strategy")
        hint = f"from flwr.serverapp.strategy import {own}; fraction_fit is fraction_train there; "
        hint += "initial_parameters, evaluate_fn go to start()"
        strategy = f"{kind.__module__}.{kind.__name__}"
    raise invalid("strategy", strategy, "be a flwr.serverapp.strategy.Strategy", hint)


def is_kind(strategy: Strategy, *names: str) -> bool:
    """Return whether a strategy is of a class of Flower's, or derives from it."""
    return any(kind.__name__ in names for kind in type(strategy).__mro__)


def trains_trees(strategy: Strategy) -> bool:
    """Return whether models are boosted trees: they grow, and take no gradient steps."""
    return format_of_trees(strategy) is not None


def format_of_trees(strategy: Strategy) -> str | None:
    """Return in which format a strategy reads boosted trees, if it does: "json", or "any"."""
    if is_kind(strategy, "FedXgbBagging"):
        return "json"
    return "any" if chooses_one_node(strategy) else None


def chooses_one_node(strategy: Strategy) -> bool:
    """Return whether a strategy has a selection of its own that no view can replace."""
    return is_kind(strategy, "FedXgbCyclic")


def updates_needed(strategy: Strategy) -> int:
    """Return of how many updates a strategy that distrusts some can choose; 1 for all others.

    Of n updates, f of them hostile: Krum needs 2 f + 3 (Blanchard et al., 2017), Bulyan 4 f + 3
    (El Mhamdi et al., 2018). With fewer Flower's Krum chooses all the same, Bulyan none.
    """
    hostile = int(getattr(strategy, "num_malicious_nodes", 0))
    if is_kind(strategy, "Bulyan"):
        return 4 * hostile + 3
    return 2 * hostile + 3 if is_kind(strategy, "Krum", "MultiKrum") else 1


def clips_on_nodes(strategy: Strategy) -> bool:
    """Return whether a strategy adds noise that is right for updates as the nodes clipped them."""
    start = "DifferentialPrivacyClientSide"
    return is_kind(strategy, f"{start}FixedClipping", f"{start}AdaptiveClipping")


def is_private(strategy: Strategy) -> bool:
    """Return whether a strategy clips updates for privacy: its noise is right for those alone."""
    return any(kind.__name__.startswith("DifferentialPrivacy") for kind in type(strategy).__mro__)


@contextmanager
def quiet_strategies(most: int = logging.INFO) -> Iterator[None]:
    """Log at DEBUG what Flower's strategies say, up to a level."""
    folder = str(Path("flwr", "serverapp", "strategy"))

    def lower(record: logging.LogRecord) -> bool:
        if record.levelno <= most and folder in record.pathname:
            record.levelno = logging.DEBUG
            record.levelname = logging.getLevelName(logging.DEBUG)
        return True

    logger = logging.getLogger("flwr")
    logger.addFilter(lower)
    try:
        yield
    finally:
        logger.removeFilter(lower)


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
    # The command line library may raise anything.
    except Exception as error:
        hint = "texts need quotes, as in \"policy='vanilla' num-tiers=3\""
        raise invalid("--run-config", " ".join(given), "be of key=value in TOML", hint) from error

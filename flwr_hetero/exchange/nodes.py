"""Which nodes there are: views of a grid, waiting for nodes, the book of nodes, figures of all."""

import hashlib
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from functools import partial
from logging import DEBUG, INFO, WARNING
from math import inf
from statistics import median_low
from typing import Any, Generic, TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

from flwr_hetero._flwr import NodeInfo, is_simulation_grid, log
from flwr_hetero.errors import clean

WAIT_S, SETTLE_S = 600.0, 20.0
"""Seconds to wait for the first node of a fleet, and for a further one that comes online."""
REGISTER_S, REGISTER_POLL_S = 2.0, 0.1
"""Seconds without a new node after which a simulation has all of its nodes; pause between looks."""
MINIMA = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
"""Settings by which Flower's strategies wait for nodes before a round."""
MOST_WARNINGS, MOST_KINDS, MOST_TEXT = 3, 100, 300
"""Warnings of a kind, whichever nodes they are of; kinds; characters of one and of a name."""
NODES_WORDS = re.compile(
    r"error -?\d+: .*|['\"].*['\"]|\(.*\)|[-+]?\d[\d.]*(e[-+]?\d+)?|\bnan\b|\binf\b"
)
"""Parts of a warning that are a node's own words, or numbers."""
LONGEST_REST = 6
"""Time-outs in a row after which a node is not backed off for longer each time."""


# --- grids around a grid -----------------------------------------------------------------
def _passed_on(name: str) -> Any:
    """Make a method that a grid around another one passes on to it."""

    def method(self: "GridAround", *args: Any, **kwargs: Any) -> Any:
        return getattr(self.grid, name)(*args, **kwargs)

    return method


class GridAround(Grid):
    """Pass everything on to another grid."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    run = property(lambda self: self.grid.run)
    set_run = _passed_on("set_run")
    create_message = _passed_on("create_message")
    get_node_ids = _passed_on("get_node_ids")
    get_nodes = _passed_on("get_nodes")
    push_messages = _passed_on("push_messages")
    pull_messages = _passed_on("pull_messages")
    send_and_receive = _passed_on("send_and_receive")


class TranslatingGrid(GridAround):
    """Send messages in another form, and read the replies out of it."""

    def write(self, message: Message) -> Message:
        """Return a message in the other form: with the same metadata, so that both get the id."""
        raise NotImplementedError

    def sent(self, message: Message, written: Message) -> None:
        """Learn that a message was sent, and so has its id."""

    def read(self, reply: Message) -> Message:
        """Return a reply in the form that strategies know."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Show what else a grid has, such as the clock of a LocalGrid and its ways to wait."""
        if name == "grid" or name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self.grid, name)
        if name in ("wait_for", "wait_for_next"):
            return lambda *args, **options: self._read_all(found(*args, **options))
        return found

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages in the other form."""
        return self._send(messages, self.grid.push_messages)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages and wait for the replies."""
        send = partial(self.grid.send_and_receive, timeout=timeout)
        return self._read_all(self._send(messages, send))

    def pull_messages(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        """Pull replies, with the arguments that the other grid's version of Flower takes."""
        return self._read_all(self.grid.pull_messages(*args, **kwargs))

    def _send(self, messages: Iterable[Message], send: Callable[..., Iterable[Any]]) -> list[Any]:
        # A message that occurs twice is sent once, as by other grids.
        distinct = {id(message): message for message in messages}.values()
        pairs = [(message, self.write(message)) for message in distinct]
        found = list(send([written for _, written in pairs]))
        for pair in pairs:
            self.sent(*pair)
        return found

    def _read_all(self, replies: Iterable[Message]) -> list[Message]:
        return [self.read(reply) for reply in replies]


class GridView(GridAround):
    """Show only the chosen nodes of a grid, so that any strategy trains these."""

    def __init__(self, grid: Grid, node_ids: Sequence[int]) -> None:
        super().__init__(grid)
        self.node_ids = list(node_ids)

    def get_node_ids(self) -> Iterable[int]:
        """Return the chosen nodes."""
        return list(self.node_ids)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return what is known of the chosen nodes."""
        chosen = set(self.node_ids)
        return [info for info in self.grid.get_nodes() if info.node_id in chosen]


def whole_grid(grid: Grid) -> Grid:
    """Return the grid behind all views of it."""
    while isinstance(grid, GridView):
        grid = grid.grid
    return grid


def is_simulated(grid: Grid) -> bool:
    """Return whether a grid's nodes are simulated, so that they may report emulated times."""
    grid = whole_grid(grid)
    return hasattr(grid, "virtual_time_s") or is_simulation_grid(grid)


def online_nodes(grid: Grid) -> Set[int]:
    """Return the nodes online as a set, without copying one."""
    node_ids = grid.get_node_ids()
    return node_ids if isinstance(node_ids, Set) else set(node_ids)


# --- waiting -----------------------------------------------------------------------------
def wait_for_nodes(
    grid: Grid, at_least: int, wait_s: float = WAIT_S, settle_s: float = inf
) -> Set[int]:
    """Wait until enough nodes are online, none has come for a while, or time is up."""
    online = online_nodes(grid)
    if len(online) >= at_least:
        return online
    whole = whole_grid(grid)
    # A LocalGrid has all nodes at once.
    wait_s = 0.0 if hasattr(whole, "virtual_time_s") else wait_s
    poll_s = 1.0
    still_s = 0.0
    # A simulation registers all nodes in a row. The nodes of a real fleet come one by one.
    if registers := is_simulation_grid(whole):
        poll_s = REGISTER_POLL_S
        still_s = REGISTER_POLL_S
        settle_s = REGISTER_S
    waited_s = same_s = 0.0
    while waited_s < wait_s:
        if not (registers or same_s):
            text = "%d nodes are online: waiting up to %.0f s for another one (see the nodes' logs)"
            left_s = min(wait_s - waited_s, settle_s if online else inf)
            log(INFO if online else WARNING, text, len(online), left_s)
        time.sleep(poll_s)
        before = len(online)
        online = online_nodes(grid)
        waited_s += poll_s
        same_s = same_s + poll_s if len(online) == before else 0.0
        if online and same_s >= (still_s if len(online) >= at_least else settle_s):
            break
    if not online:
        why = "start the SuperNodes, or see in their logs why the SuperLink has none of them"
        raise RuntimeError(f"no node is online after {waited_s:.0f} s: {why}.")
    return online


def settled_nodes(
    grid: Grid, wanted: int, wait_s: float = WAIT_S, settle_s: float = SETTLE_S
) -> Set[int]:
    """Wait until as many nodes as wanted are online, or until no further one comes."""
    return wait_for_nodes(grid, wanted, wait_s, settle_s)


# --- the book of nodes -------------------------------------------------------------------
def identity_key(identity: str) -> tuple[str, int, str]:
    """Return a key that sorts identities, trailing numbers by value."""
    match = re.fullmatch(r"(.*?)(\d+)", identity)
    return (match[1], int(match[2]), identity) if match else (identity, -1, identity)


class NodeBook:
    """Who the nodes are, which are backed off, and how often they have failed.

    An identity is, in this order: the name given at registration, a hash of the node's public
    key, the ``partition-id`` that it reports, its id. Who claims one second keeps its id.
    """

    def __init__(self) -> None:
        self._identity: dict[int, str] = {}
        self._node_id: dict[str, int] = {}
        self.failures: dict[str, Counter[str]] = defaultdict(Counter)
        """Failures in a row, by kind and identity: "silence" in rounds, "train", "evaluate"."""
        self.profile_kind: str | None = None
        """Type of the message that times a node, once it is known what the ClientApp handles."""
        # By node that is backed off: until when.
        self._until_s: dict[int, float] = {}
        self._warned: Counter[str] = Counter()

    def identity(self, node_id: int) -> str:
        """Return a node's stable identity."""
        identity = self._identity.get(node_id)
        return f"id-{node_id}" if identity is None else identity

    def knows(self, node_id: int) -> bool:
        """Return whether a node has an identity better than its node id."""
        return node_id in self._identity

    def find(self, identity: str) -> int | None:
        """Return the node id that now belongs to an identity."""
        if identity not in self._node_id and re.fullmatch(r"id-\d+", identity):
            return int(identity[3:])
        return self._node_id.get(identity)

    def sort_key(self, node_id: int) -> tuple[str, int, str]:
        """Return a key that sorts nodes by identity, trailing numbers by value."""
        return identity_key(self.identity(node_id))

    def learn(self, grid: Grid, node_ids: Iterable[int]) -> None:
        """Read names and public keys if some of these nodes have no identity yet."""
        if is_simulated(grid) or all(map(self.knows, node_ids)):
            return
        # A view shows a few nodes, but the SuperLink sends the list of all of them.
        for info in whole_grid(grid).get_nodes():
            if info.name:
                self._claim(info.node_id, clean(info.name, MOST_TEXT))
            elif info.public_key:
                self._claim(info.node_id, f"key-{hashlib.sha256(info.public_key).hexdigest()[:12]}")

    def set_partition_id(self, node_id: int, partition_id: int) -> None:
        """Name a node by the partition that it reports, unless it has a better identity."""
        if node_id not in self._identity:
            self._claim(node_id, f"node-{partition_id}")

    def rejoin(self, node_id: int, partition_id: int, online: Set[int]) -> None:
        """Name a node by its partition; a node that is offline loses that name to it."""
        owner = self.find(f"node-{partition_id}")
        gone = owner not in online and owner not in self._until_s
        if owner is not None and owner != node_id and gone:
            self.forget(owner)
        self.set_partition_id(node_id, partition_id)

    def forget(self, node_id: int) -> None:
        """Free the identity of a node that is gone, so that it can rejoin under a new id."""
        if node_id in self._identity:
            del self._node_id[self._identity.pop(node_id)]

    def _claim(self, node_id: int, identity: str) -> None:
        if self._node_id.setdefault(identity, node_id) == node_id:
            self._identity[node_id] = identity

    # --- failures in a row, and back-off ---------------------------------------------------
    def fail(self, node_id: int, kind: str = "train") -> int:
        """Count a failure; return how many there are in a row."""
        self.failures[kind][self.identity(node_id)] += 1
        return self.failures[kind][self.identity(node_id)]

    def succeed(self, node_id: int, kind: str = "train") -> None:
        """End a row of failures."""
        self.failures[kind].pop(self.identity(node_id), None)

    def failed_often(self, least: int, *kinds: str) -> set[str]:
        """Return the identities with so many failures in a row of one of these kinds."""
        rows = [self.failures[kind] for kind in kinds]
        return {name for row in rows for name, count in row.items() if count >= least}

    def keep_silent(self, node_id: int, now_s: float, timeout_s: float) -> None:
        """Back off from a node that has cost a time-out: for one, then 3, 7, 15, ... of them."""
        count = min(self.fail(node_id, "silence"), LONGEST_REST)
        self.back_off(node_id, now_s + (2**count - 1) * timeout_s)

    def back_off(self, node_id: int, until_s: float) -> None:
        """Do not ask a node before a time of the fleet's clock."""
        # The time is what the clock shows, or it might be missed.
        self._until_s[node_id] = round(until_s, 9)

    def backed_off(self, now_s: float) -> set[int]:
        """Return the nodes that are not asked now."""
        now_s = round(now_s, 9)
        return {node for node, until_s in self._until_s.items() if until_s > now_s}

    def back_s(self, now_s: float) -> float:
        """Return when the next of them may be asked again; infinity if there is none."""
        return min((until_s for until_s in self._until_s.values() if until_s > now_s), default=inf)

    def mark_alive(self, node_id: int) -> None:
        """End the silence of a node that has answered, and its back-off."""
        self.succeed(node_id, "silence")
        self._until_s.pop(node_id, None)

    def state(self) -> dict[str, list[Any]]:
        """Return by node id, for a checkpoint: identity, end of the back-off, silences in a row."""
        silences = self.failures["silence"]
        return {
            str(node): [self._identity.get(node), self._until_s.get(node), silences[name]]
            for node in sorted({*self._identity, *self._until_s})
            for name in [self.identity(node)]
        }

    def load_state(self, state: dict[str, list[Any]], online: Set[int]) -> None:
        """Go on from ``state``, for nodes that have the ids of then; a simulation's have others."""
        for node, (name, until_s, silences) in ((int(n), own) for n, own in state.items()):
            if node not in online:
                continue
            if name is not None:
                self._claim(node, clean(str(name), MOST_TEXT))
            if until_s is not None:
                self._until_s[node] = float(until_s)
            if silences:
                self.failures["silence"][self.identity(node)] = int(silences)

    def warn(self, node: int | str, reason: str) -> None:
        """Log what a node did wrong, of each kind a few times: thousands may do the same."""
        # What the node itself has written makes no kinds of its own.
        kind = NODES_WORDS.sub("#", reason)
        if kind not in self._warned and len(self._warned) >= MOST_KINDS:
            kind = ""
        self._warned[kind] += 1
        level = WARNING if self._warned[kind] <= MOST_WARNINGS else DEBUG
        name = node if isinstance(node, str) else self.identity(node)
        log(level, "%s: %s", name, clean(reason, MOST_TEXT))


# --- figures of all nodes --------------------------------------------------------------------
FEW_NODES = 100
"""Of fewer nodes than these, figures are computed again after each change."""
RENEW_SHARE = 10
"""Of more nodes, a figure is computed again when one in so many has changed."""

_Value = TypeVar("_Value")


class Figure(Generic[_Value]):
    """A value that depends on all nodes, such as a median of their speeds.

    The server's work for a reply must not grow with the number of nodes that it knows. The value
    is computed again when a tenth of the nodes have changed, and with fewer than 100 nodes after
    each change.

    >>> largest = Figure[int]()
    >>> speeds = [1, 2, 3]
    >>> largest.of(lambda: max(speeds), changes=3, nodes=3)
    3
    >>> speeds.append(9)
    >>> largest.of(lambda: max(speeds), changes=4, nodes=1000), largest.of(lambda: 5, 103, 1000)
    (3, 5)
    """

    def __init__(self) -> None:
        self._value: _Value | None = None
        self._changes = 0
        self._key: Hashable = None

    def of(
        self, compute: Callable[[], _Value], changes: int, nodes: int, key: Hashable = None
    ) -> _Value:
        """Return the value; ``changes``: the number of changes to any node so far.

        The value is computed again at once if ``key`` has changed.
        """
        enough = 1 if nodes < FEW_NODES else nodes // RENEW_SHARE
        is_old = changes - self._changes >= enough or key != self._key
        if self._value is None or is_old:
            self._value = compute()
            self._changes = changes
            self._key = key
        return self._value


def usual_of(values: Sequence[float], early: bool = False) -> float:
    """Return the median; early, as most of the first few may lie, at most twice the low quartile.

    >>> usual_of([1.0, 2.0, 9.0, 9.0, 9.0]), usual_of([1.0, 2.0, 9.0, 9.0, 9.0], early=True)
    (9.0, 4.0)
    """
    most = 2 * sorted(values)[(len(values) - 1) // 4] if early else inf
    return min(median_low(values), most)

"""An emulated fleet in this process: Flower's Grid on a virtual clock."""

from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flwr_hetero import keys
from flwr_hetero._flwr import (
    CLIENT_APP_RAISED,
    NODE_UNAVAILABLE,
    Run,
    be_server_task,
    new_run,
    set_message_id,
)
from flwr_hetero.client.device import DeviceProfile
from flwr_hetero.client.emulation import device_rng, in_config, reply_if_away, stamp
from flwr_hetero.errors import invalid
from flwr_hetero.fleet.faults import Fault, corrupt

FIRST_NODE_ID = 1_000
POLL_S = 0.1
"""Virtual seconds that an unsuccessful poll takes."""
_RUN_ID, _TASK_ID, _SUPERLINK_NODE_ID = 1, 1, 1


@dataclass
class LocalNode:
    """An emulated device with the state of its ClientApp; it does one job at a time."""

    profile: DeviceProfile
    context: Context
    free_at_s: float = 0.0

    def answer(
        self, message: Message, client_app: ClientApp, seed: int, faults: list[Fault], now_s: float
    ) -> tuple[float, Message | None]:
        """Run the ClientApp on an instruction; return when the reply arrives, and the reply."""
        partition = int(self.context.node_config[keys.PARTITION_ID])
        rng = device_rng(seed, partition, message)
        server_round, kind = in_config(message, keys.SERVER_ROUND), message.metadata.message_type
        faults = [fault for fault in faults if fault.hits(partition, server_round, kind)]
        if any(fault.kind == "dies" for fault in faults):
            return inf, None
        if away := reply_if_away(message, self.profile, rng):
            return now_s, away
        reply = self._run(message, client_app, faults)
        stamp(message, reply, self.context, self.profile, rng)
        latency_s = sum(fault.delay_s for fault in faults if fault.kind == "late")
        if reply.has_content():
            times: Any = reply.content[keys.TIMING]
            latency_s += times[keys.TRAIN_TIME] + times[keys.TRANSFER_TIME]
        self.free_at_s = max(self.free_at_s, now_s) + latency_s
        return self.free_at_s, reply

    def _run(self, message: Message, client_app: ClientApp, faults: list[Fault]) -> Message:
        if any(fault.kind == "errs" for fault in faults):
            return Message(Error(CLIENT_APP_RAISED, "injected error"), reply_to=message)
        records: dict[str, Any] = dict(message.content.items())
        copy = RecordDict({name: type(record)(dict(record)) for name, record in records.items()})
        private = Message(copy, metadata=message.metadata)  # type: ignore[call-overload]
        try:
            reply = client_app(private, self.context)
        except Exception as error:  # any error of a ClientApp becomes its reply, as in Flower
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(CLIENT_APP_RAISED, reason), reply_to=message)
        for fault in faults:
            if fault.kind == "garbage" and reply.has_content():
                with suppress(StopIteration):  # nothing to corrupt
                    corrupt(reply.content, fault.corrupt)
        return reply


@dataclass
class _Traffic:
    """Number of messages sent so far; arrival and reply (None: never) of those not collected."""

    asked: int = 0
    pending: dict[str, tuple[float, Message | None]] = field(default_factory=dict)
    in_order: list[tuple[float, str]] = field(default_factory=list)
    """Arrivals as a heap; some may have been collected."""


class LocalGrid(Grid):
    """An emulated fleet: one node per device profile, driven by a virtual clock.

    Each instruction runs the ClientApp at once; its reply *arrives* after the latency that the
    node's profile gives it. Waiting advances ``virtual_time_s`` and nothing else. A node does
    one job at a time, as a SuperNode does.

    Parameters
    ----------
    client_app : ClientApp
        Any ClientApp; ``context.node_config`` has ``partition-id`` and ``num-partitions`` as in
        a simulation, and ``emulated``.
    profiles : sequence of DeviceProfile
        One per node.
    seed : int
        Seed of jitter and availability.
    run_config : dict, optional
        What the ClientApp sees as ``context.run_config``.
    faults : sequence of Fault
        What goes wrong.

    Attributes
    ----------
    virtual_time_s : float
        Seconds of virtual time since the grid was made.

    Raises
    ------
    ValueError
        If there is no profile.

    Notes
    -----
    The content of a message is copied record by record, so that a ClientApp cannot change what
    other nodes see; array payloads are immutable bytes and shared.

    Examples
    --------
    >>> from flwr.app import Message, MetricRecord, RecordDict
    >>> app = ClientApp()
    >>> @app.query()
    ... def answer(message, context):
    ...     metrics = MetricRecord({"num-examples": 100})
    ...     return Message(RecordDict({"metrics": metrics}), reply_to=message)
    >>> grid = LocalGrid(app, profiles=[DeviceProfile(2.0), DeviceProfile(0.5)], seed=0)
    >>> questions = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
    >>> len(grid.send_and_receive(questions)), grid.virtual_time_s
    (2, 2.0)
    """

    def __init__(
        self,
        client_app: ClientApp,
        profiles: Sequence[DeviceProfile],
        seed: int = 0,
        *,
        run_config: dict[str, Any] | None = None,
        faults: Sequence[Fault] = (),
    ) -> None:
        if not profiles:
            raise invalid("profiles", profiles, "hold at least one device")
        self.client_app = client_app
        self.seed = seed
        self.faults = list(faults)
        self.virtual_time_s = 0.0
        self.traffic = _Traffic()
        self._run = new_run(_RUN_ID)
        be_server_task(_RUN_ID, _TASK_ID, _SUPERLINK_NODE_ID)
        self._run_config = dict(run_config or {})
        self._num_partitions = len(profiles)
        self._nodes: dict[int, LocalNode] = {}
        self._online: dict[int, None] = {}
        for profile in profiles:
            self.join(profile)

    # --- the fleet -----------------------------------------------------------------

    def join(self, profile: DeviceProfile) -> int:
        """Add a node to the fleet, bring it online and return its id.

        Its ``partition-id`` is the next free one; ``num-partitions`` stays that of the start.
        """
        partition = len(self._nodes)
        node_id = FIRST_NODE_ID + partition
        config: dict[str, Any] = {keys.PARTITION_ID: partition, keys.EMULATED: True}
        config["num-partitions"] = self._num_partitions
        context = Context(self._run.run_id, node_id, config, RecordDict(), dict(self._run_config))
        self._nodes[node_id] = LocalNode(profile, context)
        self._online[node_id] = None
        return node_id

    def leave(self, node_id: int) -> None:
        """Take a node offline; its state stays, messages to it are answered with an error."""
        self._online.pop(node_id, None)

    def come_back(self, node_id: int) -> None:
        """Bring a node online that was there before."""
        if node_id not in self._nodes:
            raise invalid("node_id", node_id, "be a node that was there before", "use join")
        self._online[node_id] = None

    def set_profile(self, node_id: int, profile: DeviceProfile) -> None:
        """Replace a node's device from now on: throttling, or another link."""
        self._nodes[node_id].profile = profile

    def context(self, node_id: int) -> Context:
        """Return a node's live context, for tests to read or damage its state."""
        return self._nodes[node_id].context

    # --- Flower's Grid -------------------------------------------------------------

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self._run = run

    @property
    def run(self) -> Run:
        """Run information."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Make a message; ``Message(...)`` does the same."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes online, as a set-like view in order of joining."""
        return self._online.keys()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send instructions to the nodes; return their message ids."""
        ids = []
        for message in messages:
            self.traffic.asked += 1
            message_id = f"{self.traffic.asked:08d}"
            set_message_id(message, message_id)
            arrival_s, reply = self._answer(message)
            if reply is not None:
                set_message_id(reply, f"{message_id}-reply")
            self.traffic.pending[message_id] = arrival_s, reply
            heappush(self.traffic.in_order, (arrival_s, message_id))
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Collect the replies that have arrived; an unsuccessful poll takes ``POLL_S``."""
        ids = set(message_ids)
        arrived = self._collect(ids, self.virtual_time_s)
        if ids and not arrived:
            self.virtual_time_s += POLL_S
        return arrived

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send instructions and wait for all replies, or until the time-out."""
        return self.wait_for(self.push_messages(messages), timeout)

    def wait_for(
        self, message_ids: Iterable[str], timeout: float | None = None, enough: int | None = None
    ) -> list[Message]:
        """Wait for the replies to instructions sent before.

        Parameters
        ----------
        message_ids : iterable of str
            From :meth:`push_messages`.
        timeout : float, optional
            Seconds of virtual time. None: nodes that never answer are waited for as long as
            the others need.
        enough : int, optional
            Wait for no more replies than this, errors not counted.

        Returns
        -------
        list of Message
            In order of arrival. Replies that come later can still be pulled.
        """
        now_s = self.virtual_time_s
        deadline_s = inf if timeout is None else now_s + timeout
        pending = {i: self.traffic.pending[i] for i in message_ids}
        arrivals = [arrival_s for arrival_s, _ in pending.values()]
        good = sorted(at_s for at_s, reply in pending.values() if reply and reply.has_content())
        in_time = [arrival_s for arrival_s in arrivals if arrival_s <= deadline_s]
        if enough is not None and len(good) >= enough and good[enough - 1] <= deadline_s:
            until_s = good[enough - 1]
        elif len(in_time) < len(arrivals) and deadline_s < inf:
            until_s = deadline_s
        else:
            until_s = max((arrival_s for arrival_s in in_time if arrival_s < inf), default=now_s)
        self.virtual_time_s = max(now_s, until_s)
        return self._collect(set(pending), min(deadline_s, self.virtual_time_s))

    def wait_for_next(self, message_ids: Iterable[str], until_s: float = inf) -> list[Message]:
        """Wait for the next reply, or until a virtual time; return what has arrived by then."""
        ids = message_ids if isinstance(message_ids, Set) else set(message_ids)
        pending, queue = self.traffic.pending, self.traffic.in_order
        mine: set[str] = set()
        others: list[tuple[float, str]] = []
        while queue and queue[0][0] <= until_s and queue[0][0] < inf:
            at_s, message_id = heappop(queue)
            if message_id in pending and message_id not in ids:
                others.append((at_s, message_id))
            elif message_id in pending:
                mine.add(message_id)
                until_s = max(self.virtual_time_s, at_s)
        for entry in others:
            heappush(queue, entry)
        if until_s < inf:
            self.virtual_time_s = max(self.virtual_time_s, until_s)
        return self._collect(mine, self.virtual_time_s)

    def _answer(self, message: Message) -> tuple[float, Message | None]:
        """Return when a node's reply arrives, and the reply; None if it sends none."""
        now_s, node_id = self.virtual_time_s, message.metadata.dst_node_id
        if node_id in self._online:
            node = self._nodes[node_id]
            return node.answer(message, self.client_app, self.seed, self.faults, now_s)
        error = Error(NODE_UNAVAILABLE, "the node is offline")
        return now_s, Message(error, reply_to=message)

    def _collect(self, ids: set[str], until_s: float) -> list[Message]:
        pending = self.traffic.pending
        arrived = sorted((pending[i][0], i) for i in ids & pending.keys())
        replies = [pending.pop(i)[1] for arrival_s, i in arrived if arrival_s <= until_s]
        return [reply for reply in replies if reply is not None]

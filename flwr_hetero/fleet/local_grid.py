"""An emulated fleet in this process: Flower's Grid on a virtual clock."""

import sys
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from numpy.random import default_rng

from flwr_hetero import _flwr, keys
from flwr_hetero.client.data_pass import GlobalGenerators
from flwr_hetero.client.device import DeviceProfile, message_time_s
from flwr_hetero.client.emulation import device_seed, in_config, reply_if_away, stamp
from flwr_hetero.errors import check_count, invalid
from flwr_hetero.fleet.faults import Fault, corrupt

FIRST_NODE_ID = 1_000
POLL_S = 0.1  # virtual seconds that an unsuccessful poll takes
Answer = tuple[float, Message | None]  # when a reply arrives, and the reply if there is one


@dataclass
class LocalNode:
    """An emulated device and the state of its ClientApp. It does one job at a time."""

    profile: DeviceProfile
    context: Context
    seed: int
    free_at_s: float = 0.0

    def answer(
        self, message: Message, client_app: ClientApp, faults: Sequence[Fault], now_s: float
    ) -> Answer:
        """Run the ClientApp on an instruction; return when the reply arrives, and the reply."""
        partition = int(self.context.node_config[keys.PARTITION_ID])
        if faults:
            server_round = in_config(message, keys.SERVER_ROUND)
            kind = message.metadata.message_type
            faults = [fault for fault in faults if fault.hits(partition, server_round, kind)]
        if any(fault.kind == "dies" for fault in faults):
            return inf, None
        seed = device_seed(self.seed, partition, message)
        rng = None
        # Most profiles draw nothing.
        if self.profile.jitter or self.profile.poll_s or self.profile.availability < 1:
            rng = default_rng(seed)
            away = reply_if_away(message, self.profile, rng)
            if away is not None:
                return now_s, away
        # The seed comes from the message alone, so that other nodes' draws do not change it.
        app_seed = int(seed.generate_state(1)[0])
        GlobalGenerators().seed(app_seed)
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(app_seed)
        reply = self._run(message, client_app, faults)
        # As with a real node, the message's own cost is in the round trip, not in the reply. It is
        # drawn before the jitter, as in Flower's simulation.
        latency_s = message_time_s(self.profile, rng)
        stamp(message, reply, self.context, self.profile, rng)
        latency_s += sum(fault.delay_s for fault in faults if fault.kind == "late")
        if reply.has_content():
            times: Any = reply.content[keys.TIMING]
            latency_s += times[keys.TRAIN_TIME] + times[keys.TRANSFER_TIME]
        self.free_at_s = max(self.free_at_s, now_s) + latency_s
        return self.free_at_s, reply

    def _run(self, message: Message, client_app: ClientApp, faults: Sequence[Fault]) -> Message:
        def fail(reason: str) -> Message:
            return Message(Error(_flwr.CLIENT_APP_RAISED, reason), reply_to=message)

        if any(fault.kind == "errs" for fault in faults):
            return fail("injected error")
        # Copy the records, so that a ClientApp cannot change what other nodes see. The bytes of
        # the arrays are immutable and can be shared.
        content = RecordDict()
        for name, record in message.content.items():
            copied = record.copy()
            if isinstance(record, ArrayRecord):
                _flwr.set_entries(copied, {key: copy(array) for key, array in record.items()})
            _flwr.set_entries(content, {name: copied})
        instruction = Message(content, metadata=message.metadata)  # type: ignore[call-overload]
        try:
            reply: Any = client_app(instruction, self.context)
        # Flower, too, turns any error of a ClientApp into its reply.
        except Exception as error:
            return fail(f"{type(error).__name__}: {error}")
        if not isinstance(reply, Message):
            return fail(f"the ClientApp returned {type(reply).__name__}, not a Message")
        for fault in faults:
            if fault.kind == "garbage" and reply.has_content():
                corrupt(reply.content, fault.corrupt)
        return reply


class PendingReply(NamedTuple):
    """A reply that has not been collected, and the virtual time when its message expires."""

    arrival_s: float
    reply: Message
    expiry_s: float


class LocalGrid(Grid):
    """An emulated fleet: one node per device profile, driven by a virtual clock.

    Each instruction runs the ClientApp at once; its reply *arrives* after the latency that the
    node's profile gives it. Only waiting advances ``virtual_time_s``, in seconds. A node does one
    job at a time, as a SuperNode does. Global generators are seeded for each message.

    Parameters
    ----------
    client_app : ClientApp
        Sees ``partition-id`` and ``num-partitions`` in ``context.node_config``, as in a simulation.
    profiles : sequence of DeviceProfile
        One per node; ValueError if there is none.
    seed : int
        Seed of jitter, availability and the waits for a poll.
    run_config : dict, optional
        The ``context.run_config`` of the ClientApp.
    faults : sequence of Fault
        Faults to inject into the nodes' replies.

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
        self.faults = list(faults)
        self.seed = check_count("seed", seed)
        self.virtual_time_s = 0.0
        self.num_sent = 0
        self.pending: dict[str, PendingReply] = {}
        # No pending reply expires before this.
        self._next_expiry_s = inf
        self._run = _flwr.new_run(_flwr.be_server_task(run_id=1, task_id=1, node_id=1))
        self._run_config = dict(run_config or {})
        self._node_config = {keys.EMULATED: True, "num-partitions": len(profiles)}
        self._nodes: dict[int, LocalNode] = {}
        self._online: dict[int, None] = {}  # only keys, in the order in which they joined
        for profile in profiles:
            self.join(profile)

    def join(self, profile: DeviceProfile) -> int:
        """Add a node to the fleet, with the next ``partition-id``; return its id."""
        partition = len(self._nodes)
        node_id = FIRST_NODE_ID + partition
        config: dict[str, Any] = {**self._node_config, keys.PARTITION_ID: partition}
        context = Context(self._run.run_id, node_id, config, RecordDict(), dict(self._run_config))
        self._nodes[node_id] = LocalNode(profile, context, self.seed)
        self._online[node_id] = None
        return node_id

    def leave(self, node_id: int) -> None:
        """Take a node offline: messages to it get an error reply. Its state is kept."""
        self._online.pop(node_id, None)

    def come_back(self, node_id: int) -> None:
        """Bring a node online again after :meth:`leave`."""
        self._online[node_id] = None

    def set_profile(self, node_id: int, profile: DeviceProfile) -> None:
        """Replace a node's device from now on."""
        self._nodes[node_id].profile = profile

    def context(self, node_id: int) -> Context:
        """Return a node's live context, for tests to read or damage its state."""
        return self._nodes[node_id].context

    def set_run(self, run: _flwr.Run) -> None:
        """Set the run."""
        self._run = run

    @property
    def run(self) -> _flwr.Run:
        """A copy of the run's information."""
        return _flwr.Run(**vars(self._run))

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Make a message, as ``Message(...)`` does."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that are online, in the order in which they joined."""
        return self._online.keys()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send instructions; return the ids of the messages to nodes that exist."""
        now_s = self.virtual_time_s
        if now_s > self._next_expiry_s:
            kept = {i: entry for i, entry in self.pending.items() if entry.expiry_s >= now_s}
            self.pending = kept
            self._next_expiry_s = min((entry.expiry_s for entry in kept.values()), default=inf)
        distinct = list({id(message): message for message in messages}.values())
        for message in distinct:
            metadata = message.metadata
            if metadata.reply_to_message_id or metadata.delivered_at or metadata.ttl <= 0:
                raise ValueError(f"Invalid message, a reply or sent before: {metadata}")
        sent = [m for m in distinct if m.metadata.dst_node_id in self._nodes]
        for message in sent:
            self.num_sent += 1
            _flwr.set_message_id(message, f"{self.num_sent:08d}")
        with GlobalGenerators().restored():
            return [self._keep(message, self._answer(message)) for message in sent]

    def _answer(self, message: Message) -> Answer:
        """Run a node on an instruction; return when its reply arrives, and the reply."""
        node_id = message.metadata.dst_node_id
        now_s = self.virtual_time_s
        if node_id not in self._online:
            offline = Error(_flwr.NODE_UNAVAILABLE, "the node is offline")
            return now_s, Message(offline, reply_to=message)
        return self._nodes[node_id].answer(message, self.client_app, self.faults, now_s)

    def _keep(self, message: Message, answer: Answer) -> str:
        """Keep a reply until it is collected; return the message's id."""
        arrival_s, reply = answer
        message_id = message.metadata.message_id
        message.metadata.delivered_at = datetime.now(UTC).isoformat()
        expiry_s = self.virtual_time_s + message.metadata.ttl
        # Flower, too, answers a message that has expired with an error.
        if reply is None or arrival_s > expiry_s:
            arrival_s = expiry_s
            reply = _flwr.unavailable(message_id)
        else:
            _flwr.set_message_id(reply, f"{message_id}-reply")
        self.pending[message_id] = PendingReply(arrival_s, reply, expiry_s)
        self._next_expiry_s = min(self._next_expiry_s, expiry_s)
        return message_id

    def pull_messages(  # type: ignore[override]
        self,
        reply_to_message_ids: Iterable[str] | None = None,
        *,
        message_ids: Iterable[str] | None = None,
    ) -> Iterable[Message]:
        """Collect the replies that have arrived; an unsuccessful poll takes ``POLL_S``.

        As in Flower 1.43, None stands for all messages. ``message_ids`` is the name until 1.42.
        """
        if reply_to_message_ids is not None and message_ids is not None:
            raise TypeError("reply_to_message_ids and message_ids are the same: give one of them")
        given = message_ids if reply_to_message_ids is None else reply_to_message_ids
        ids = set(self.pending if given is None else given)
        arrived = self._collect_all(ids)
        if ids and not arrived:
            self.virtual_time_s += POLL_S
        return arrived

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send instructions and wait for all replies, or until the time-out."""
        return self.wait_for(self.push_messages(messages), timeout)

    def wait_for(self, message_ids: Iterable[str], timeout: float | None = None) -> list[Message]:
        """Wait for replies for at most ``timeout`` virtual seconds; return them as they arrive.

        Without a time-out, the wait lasts until the messages to nodes that never answer expire.
        Replies that arrive later can still be pulled.
        """
        ids = set(message_ids)
        arrivals_s = [self.pending[i].arrival_s for i in ids & self.pending.keys()]
        until_s = max(arrivals_s, default=self.virtual_time_s)
        if timeout is not None:
            until_s = min(until_s, self.virtual_time_s + timeout)
        self.virtual_time_s = max(self.virtual_time_s, until_s)
        return self._collect_all(ids)

    def wait_for_next(self, message_ids: Iterable[str], until_s: float = inf) -> list[Message]:
        """Wait for the next reply, or until a virtual time; return what has arrived by then."""
        awaited = set(message_ids) & self.pending.keys()
        until_s = min([until_s, *(self.pending[i].arrival_s for i in awaited)])
        if until_s < inf:
            self.virtual_time_s = max(self.virtual_time_s, until_s)
        return self._collect(awaited)

    def _collect(self, ids: set[str]) -> list[Message]:
        """Return the replies that have arrived by now, in the order of their arrival."""
        arrivals = [(self.pending[i].arrival_s, i) for i in ids & self.pending.keys()]
        arrived = sorted(arrival for arrival in arrivals if arrival[0] <= self.virtual_time_s)
        return [self.pending.pop(i).reply for _, i in arrived]

    def _collect_all(self, ids: set[str]) -> list[Message]:
        """Return the same after errors for messages that were collected, expired or never sent."""
        unknown = [_flwr.unavailable(i) for i in sorted(ids - self.pending.keys())]
        return unknown + self._collect(ids)

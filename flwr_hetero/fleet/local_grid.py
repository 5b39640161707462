"""An emulated fleet in this process: Flower's Grid on a virtual clock."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flwr_hetero import _flwr, keys
from flwr_hetero.client.data_pass import Stream
from flwr_hetero.client.device import DeviceProfile, message_time_s
from flwr_hetero.client.emulation import device_rng, in_config, reply_if_away, stamp
from flwr_hetero.errors import check_count, invalid
from flwr_hetero.fleet.faults import Fault, corrupt
from flwr_hetero.records import arrays_in, own_records

FIRST_NODE_ID = 1_000
# virtual seconds that an unsuccessful poll takes
POLL_S = 0.1
# When a reply arrives, and the reply; None if there is none.
Answer = tuple[float, Message | None]


@dataclass
class LocalNode:
    """An emulated device with the state of its ClientApp; it does one job at a time."""

    profile: DeviceProfile
    context: Context
    seed: int
    free_at_s: float = 0.0

    def answer(
        self, message: Message, client_app: ClientApp, faults: list[Fault], now_s: float
    ) -> Answer:
        """Run the ClientApp on an instruction; return when the reply arrives, and the reply."""
        partition = int(self.context.node_config[keys.PARTITION_ID])
        rng = device_rng(self.seed, partition, message)
        server_round, kind = in_config(message, keys.SERVER_ROUND), message.metadata.message_type
        faults = [fault for fault in faults if fault.hits(partition, server_round, kind)]
        if any(fault.kind == "dies" for fault in faults):
            return inf, None
        if away := reply_if_away(message, self.profile, rng):
            return now_s, away
        # what a node draws depends on the message alone, not on who worked before it
        own_seed = int(rng.bit_generator.seed_seq.generate_state(1)[0])
        with Stream(own_seed).used():
            if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
                torch.cuda.manual_seed_all(own_seed)
            reply = self._run(message, client_app, faults)
        stamp(message, reply, self.context, self.profile, rng)
        # as of a real node, only the round trip holds what the message itself costs
        latency_s = message_time_s(self.profile)
        latency_s += sum(fault.delay_s for fault in faults if fault.kind == "late")
        if reply.has_content():
            times: Any = reply.content[keys.TIMING]
            latency_s += times[keys.TRAIN_TIME] + times[keys.TRANSFER_TIME]
        # as a SuperNode, which takes a message when it is through with the one before
        self.free_at_s = max(self.free_at_s, now_s) + latency_s
        return self.free_at_s, reply

    def _run(self, message: Message, client_app: ClientApp, faults: list[Fault]) -> Message:
        def fail(reason: str) -> Message:
            return Message(Error(_flwr.CLIENT_APP_RAISED, reason), reply_to=message)

        if any(fault.kind == "errs" for fault in faults):
            return fail("injected error")
        copy = own_records(message.content)
        # a ClientApp cannot change what other nodes see; arrays are immutable bytes, and shared
        for name, arrays in arrays_in(copy).items():
            copy[name] = ArrayRecord(dict(arrays))
        private = Message(copy, metadata=message.metadata)  # type: ignore[call-overload]
        try:
            reply: Any = client_app(private, self.context)
        # any error of a ClientApp becomes its reply, as in Flower
        except Exception as error:
            return fail(f"{type(error).__name__}: {error}")
        # an app without a return, for instance
        if not isinstance(reply, Message):
            return fail(f"the ClientApp returned {type(reply).__name__}, not a Message")
        for fault in faults:
            if fault.kind == "garbage" and reply.has_content():
                corrupt(reply.content, fault.corrupt)
        return reply


class PendingReply(NamedTuple):
    """A reply that nobody has collected: when it arrives, and when its message ends."""

    arrival_s: float
    reply: Message
    until_s: float


class LocalGrid(Grid):
    """An emulated fleet: one node per device profile, driven by a virtual clock.

    Each instruction runs the ClientApp at once; its reply *arrives* after the latency that the
    node's profile gives it. Waiting advances ``virtual_time_s``, in seconds, and nothing else. A
    node does one job at a time, as a SuperNode does. Global generators are seeded for each message.

    Parameters
    ----------
    client_app : ClientApp
        Sees ``partition-id`` and ``num-partitions`` in ``context.node_config``, as in a simulation.
    profiles : sequence of DeviceProfile
        One per node; ValueError if there is none.
    seed : int
        Seed of jitter and availability.
    run_config : dict, optional
        What the ClientApp sees as ``context.run_config``.
    faults : sequence of Fault
        What goes wrong.

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
        self.client_app, self.faults = client_app, list(faults)
        self.seed = check_count("seed", seed)
        self.virtual_time_s = 0.0
        # when the replies collected last arrived, by the id of the instruction
        self.arrived_s: dict[str, float] = {}
        # messages sent, and replies by the id of the instruction
        self.num_sent, self.pending = 0, dict[str, PendingReply]()
        self._run = _flwr.new_run(_flwr.be_server_task(run_id=1, task_id=1, node_id=1))
        self._run_config = dict(run_config or {})
        self._node_config = {keys.EMULATED: True, "num-partitions": len(profiles)}
        self._nodes, self._online = dict[int, LocalNode](), dict[int, None]()
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
        """Take a node offline; its state stays, messages to it are answered with an error."""
        self._online.pop(node_id, None)

    def come_back(self, node_id: int) -> None:
        """Bring a node online that was there before."""
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
        """Make a message; ``Message(...)`` does the same."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes online, as a set-like view in order of joining."""
        return self._online.keys()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send instructions to the nodes; return the message ids of those that there are."""
        now_s = self.virtual_time_s
        self.pending = {i: each for i, each in self.pending.items() if each.until_s >= now_s}
        distinct = list({id(message): message for message in messages}.values())
        for metadata in (message.metadata for message in distinct):
            if metadata.reply_to_message_id or metadata.delivered_at or metadata.ttl <= 0:
                raise ValueError(f"Invalid message, a reply or sent before: {metadata}")
        known = [m for m in distinct if m.metadata.dst_node_id in self._nodes]
        return [self._keep(message, self._answer(message)) for message in known]

    def _answer(self, message: Message) -> Answer:
        """Let a node answer; return when its reply arrives, and the reply."""
        self.num_sent += 1
        _flwr.set_message_id(message, f"{self.num_sent:08d}")
        now_s, node_id = self.virtual_time_s, message.metadata.dst_node_id
        if node_id not in self._online:
            offline = Error(_flwr.NODE_UNAVAILABLE, "the node is offline")
            return now_s, Message(offline, reply_to=message)
        return self._nodes[node_id].answer(message, self.client_app, self.faults, now_s)

    def _keep(self, message: Message, answer: Answer) -> str:
        """Keep a reply until it arrives; return the message's id."""
        (arrival_s, reply), message_id = answer, message.metadata.message_id
        message.metadata.delivered_at = datetime.now(UTC).isoformat()
        until_s = self.virtual_time_s + message.metadata.ttl
        # as by Flower: what is not answered within its time to live is answered with an error
        if reply is None or arrival_s > until_s:
            arrival_s, reply = until_s, _flwr.unavailable(message_id)
        else:
            _flwr.set_message_id(reply, f"{message_id}-reply")
        self.pending[message_id] = PendingReply(arrival_s, reply, until_s)
        return message_id

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Collect the replies that have arrived; an unsuccessful poll takes ``POLL_S``."""
        ids = set(message_ids)
        arrived = [*self._unknown(ids), *self._collect(ids, self.virtual_time_s)]
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
        """Wait for replies, ``timeout`` virtual seconds at most; return them as they arrive.

        Without a time-out nodes that never answer are waited for until their messages end. Replies
        that come later can still be pulled. No more than ``enough`` good ones are waited for.
        """
        ids = set(message_ids)
        awaited = [self.pending[i] for i in ids & self.pending.keys()]
        # errors are no replies that a round could use
        good = sorted(each.arrival_s for each in awaited if each.reply.has_content())
        until_s = max((each.arrival_s for each in awaited), default=self.virtual_time_s)
        if enough is not None and len(good) >= enough:
            until_s = good[enough - 1]
        if timeout is not None:
            until_s = min(until_s, self.virtual_time_s + timeout)
        self.virtual_time_s = max(self.virtual_time_s, until_s)
        return [*self._unknown(ids), *self._collect(ids, self.virtual_time_s)]

    def wait_for_next(self, message_ids: Iterable[str], until_s: float = inf) -> list[Message]:
        """Wait for the next reply, or until a virtual time; return what has arrived by then."""
        mine = set(message_ids) & self.pending.keys()
        until_s = min([until_s, *(self.pending[i].arrival_s for i in mine)])
        if until_s < inf:
            self.virtual_time_s = max(self.virtual_time_s, until_s)
        return self._collect(mine, self.virtual_time_s)

    def _collect(self, ids: set[str], until_s: float) -> list[Message]:
        arrived = sorted((self.pending[i].arrival_s, i) for i in ids & self.pending.keys())
        self.arrived_s = {i: at_s for at_s, i in arrived if at_s <= until_s}
        return [self.pending.pop(i).reply for i in self.arrived_s]

    def _unknown(self, ids: set[str]) -> list[Message]:
        """Return errors for messages that were collected, have ended or were never sent."""
        return [_flwr.unavailable(i) for i in sorted(ids - self.pending.keys())]

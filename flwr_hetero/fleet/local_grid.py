"""Virtual time: what a synchronous round costs when nobody really sleeps."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf, isfinite
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
from flwr_hetero.client.emulation import (
    device_rng,
    in_config,
    is_available,
    stamp,
)
from flwr_hetero.errors import invalid
from flwr_hetero.fleet.faults import CORRUPTIONS, Fault


class VirtualClock:
    """A clock that moves only when told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def advance_to(self, time_s: float) -> None:
        """Move to a point in time; earlier points change nothing."""
        if not isfinite(time_s):
            raise invalid("time_s", time_s, "be finite", "an answer that never comes has no time")
        self.now_s = max(self.now_s, time_s)


@dataclass
class LocalNode:
    """An emulated device with the state of its ClientApp; it does one job at a time."""

    profile: DeviceProfile
    context: Context
    free_at_s: float = 0.0

    def answer(
        self,
        message: Message,
        client_app: ClientApp,
        *,
        seed: int,
        faults: Sequence[Fault],
        now_s: float,
    ) -> tuple[float, Message | None]:
        """Do what an instruction says."""
        partition = int(self.context.node_config[keys.PARTITION_ID])
        rng = device_rng(seed, partition, message)
        server_round, kind = in_config(message, keys.SERVER_ROUND), message.metadata.message_type
        hit = [fault for fault in faults if fault.hits(partition, server_round, kind)]
        if any(fault.kind == "dies" for fault in hit):
            return inf, None
        if not is_available(self.profile, rng):
            error = Error(NODE_UNAVAILABLE, "the emulated device is away")
            return now_s, Message(error, reply_to=message)
        reply = self._run(message, client_app, hit)
        stamp(message, reply, self.context, self.profile, rng)
        latency_s = _latency_s(reply) + sum(f.delay_s for f in hit if f.kind == "late")
        self.free_at_s = max(self.free_at_s, now_s) + latency_s
        return self.free_at_s, reply

    def _run(self, message: Message, client_app: ClientApp, faults: list[Fault]) -> Message:
        if any(fault.kind == "errs" for fault in faults):
            error = Error(CLIENT_APP_RAISED, "injected error")
            return Message(error, reply_to=message)
        private = Message(_copy(message.content), metadata=message.metadata)  # type: ignore[call-overload]
        try:
            reply = client_app(private, self.context)
        except Exception as error:  # whatever a ClientApp raises becomes its reply, as in Flower
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(CLIENT_APP_RAISED, reason), reply_to=message)
        for fault in faults:
            if fault.kind == "garbage" and reply.has_content():
                with suppress(StopIteration):  # nothing there to spoil
                    CORRUPTIONS[fault.corrupt](reply.content)
        return reply


def _copy(content: RecordDict) -> RecordDict:
    copy = RecordDict()
    for name, record in content.items():
        kind: Any = type(record)
        copy[name] = kind(dict(record.items()))
    return copy


def _latency_s(reply: Message) -> float:
    if not reply.has_content():
        return 0.0
    times = reply.content[keys.TIMING]
    return float(times[keys.TRAIN_TIME]) + float(times[keys.TRANSFER_TIME])  # type: ignore


FIRST_NODE_ID = 1_000


POLL_S = 0.1


_RUN_ID, _TASK_ID, _SUPERLINK_NODE_ID = 1, 1, 1


@dataclass
class _Pending:
    node_id: int
    arrival_s: float
    reply: Message | None


@dataclass
class _Traffic:
    """Messages asked and answered so far."""

    asked: int = 0
    answered: int = 0
    pending: dict[str, _Pending] = field(default_factory=dict)


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
            raise invalid("profiles", profiles, "hold at least one device", "pass one per node")
        self.client_app = client_app
        self.seed = seed
        self.faults = list(faults)
        self.traffic = _Traffic()
        self._clock = VirtualClock()
        self._run = new_run(_RUN_ID)
        be_server_task(_RUN_ID, _TASK_ID, _SUPERLINK_NODE_ID)
        self._run_config = dict(run_config or {})
        self._num_partitions = len(profiles)
        self._nodes: dict[int, LocalNode] = {}
        self._online: dict[int, None] = {}
        for profile in profiles:
            self.join(profile)

    # --- the fleet -----------------------------------------------------------------

    @property
    def virtual_time_s(self) -> float:
        """Seconds of virtual time since the grid was made."""
        return self._clock.now_s

    def join(self, profile: DeviceProfile) -> int:
        """Add a node to the fleet and bring it online.

        Parameters
        ----------
        profile : DeviceProfile
            Its device.

        Returns
        -------
        int
            Its node id; its ``partition-id`` is the next free one, and ``num-partitions``
            stays what the fleet began with.
        """
        partition = len(self._nodes)
        node_id = FIRST_NODE_ID + partition
        config: dict[str, Any] = {keys.PARTITION_ID: partition, keys.EMULATED: True}
        config["num-partitions"] = self._num_partitions
        context = Context(
            self._run.run_id, node_id, dict(config), RecordDict(), dict(self._run_config)
        )
        self._nodes[node_id] = LocalNode(profile, context)
        self._online[node_id] = None
        return node_id

    def leave(self, node_id: int) -> None:
        """Take a node offline; its state stays, messages to it are answered with an error.

        Parameters
        ----------
        node_id : int
            The node.
        """
        self._online.pop(node_id, None)

    def come_back(self, node_id: int) -> None:
        """Bring a node online again.

        Parameters
        ----------
        node_id : int
            A node that was there before.
        """
        if node_id not in self._nodes:
            raise invalid("node_id", node_id, "be a node that was there before", "use join")
        self._online[node_id] = None

    def set_profile(self, node_id: int, profile: DeviceProfile) -> None:
        """Give a node another device from now on (throttling, another link).

        Parameters
        ----------
        node_id : int
            The node.
        profile : DeviceProfile
            Its device from now on.
        """
        self._nodes[node_id].profile = profile

    def context(self, node_id: int) -> Context:
        """Return a node's context, to look at or spoil its state in tests.

        Parameters
        ----------
        node_id : int
            The node.

        Returns
        -------
        Context
            The live object.
        """
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
        """Hand instructions to the nodes; returns their message ids."""
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Collect the replies that have arrived; a look in vain takes ``POLL_S`` virtually."""
        ids = set(message_ids)
        arrived = self._collect(ids, self.virtual_time_s)
        if ids and not arrived:
            self._clock.advance_to(self.virtual_time_s + POLL_S)
        return arrived

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Hand over instructions and wait for all replies, or until the time-out.

        Without a time-out, nodes that never answer are waited for as long as the others need.
        """
        return self.wait_for(self.push_messages(messages), timeout)

    def wait_for(
        self, message_ids: Iterable[str], timeout: float | None = None, enough: int | None = None
    ) -> list[Message]:
        """Wait for the replies to instructions handed over before.

        Parameters
        ----------
        message_ids : iterable of str
            From :meth:`push_messages`.
        timeout : float, optional
            Seconds of virtual time. None: nodes that never answer are waited for as long as
            the others need.
        enough : int, optional
            Wait for no more replies than this, errors left out.

        Returns
        -------
        list of Message
            In order of arrival. Replies that come later can still be pulled.
        """
        ids, pending = set(message_ids), self.traffic.pending
        deadline_s = inf if timeout is None else self.virtual_time_s + timeout
        arrivals = sorted(pending[i].arrival_s for i in ids)
        good = sorted(pending[i].arrival_s for i in ids if _is_good(pending[i].reply))
        in_time = [arrival for arrival in arrivals if arrival <= deadline_s]
        if enough is not None and len(good) >= enough and good[enough - 1] <= deadline_s:
            self._clock.advance_to(good[enough - 1])
        elif len(in_time) < len(arrivals) and deadline_s < inf:
            self._clock.advance_to(deadline_s)
        elif finite := [arrival for arrival in in_time if arrival < inf]:
            self._clock.advance_to(max(finite))
        return self._collect(ids, min(deadline_s, self.virtual_time_s))

    def _push(self, message: Message) -> str:
        traffic = self.traffic
        traffic.asked += 1
        message_id = f"{traffic.asked:08d}"
        set_message_id(message, message_id)
        node_id = message.metadata.dst_node_id
        arrival_s, reply = self._answer(message, node_id)
        if reply is not None:
            set_message_id(reply, f"{message_id}-reply")
        traffic.pending[message_id] = _Pending(node_id, arrival_s, reply)
        return message_id

    def _collect(self, ids: set[str], until_s: float) -> list[Message]:
        pending = self.traffic.pending
        arrived = sorted(
            (p.arrival_s, i) for i in ids if (p := pending.get(i)) and p.arrival_s <= until_s
        )
        self.traffic.answered += len(arrived)
        return [reply for _, i in arrived if (reply := pending.pop(i).reply) is not None]

    def _answer(self, message: Message, node_id: int) -> tuple[float, Message | None]:
        now_s = self.virtual_time_s
        if node_id not in self._online:
            return now_s, Message(Error(NODE_UNAVAILABLE, "the node is offline"), reply_to=message)
        return self._nodes[node_id].answer(
            message, self.client_app, seed=self.seed, faults=self.faults, now_s=now_s
        )


def _is_good(reply: Message | None) -> bool:
    return reply is not None and reply.has_content()

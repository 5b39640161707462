"""A node of the in-process grid: one instruction, one reply, and when it is there."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from flwr_hetero import keys
from flwr_hetero.core.device import DeviceProfile
from flwr_hetero.fleet.faults import CORRUPTIONS, Fault
from flwr_hetero.mod.emulation import (
    NODE_UNAVAILABLE,
    device_rng,
    in_config,
    is_available,
    stamp,
)

CLIENT_APP_RAISED_EXCEPTION = 2


@dataclass
class LocalNode:
    """An emulated device with the state of its ClientApp; it does one job at a time.

    Parameters
    ----------
    profile : DeviceProfile
        Its device.
    context : Context
        Of its ClientApp.
    free_at_s : float
        Virtual time at which its last job is done.
    """

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
        """Do what an instruction says.

        Parameters
        ----------
        message : Message
            The instruction; not changed.
        client_app : ClientApp
            Does it, on a copy.
        seed : int
            Of jitter and availability.
        faults : sequence of Fault
            Of the whole fleet.
        now_s : float
            Virtual time.

        Returns
        -------
        arrival_s : float
            Virtual time at which the reply is there; infinite if it never is.
        reply : Message or None
            With content or an error; None if the node dies over it.
        """
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
            error = Error(CLIENT_APP_RAISED_EXCEPTION, "injected error")
            return Message(error, reply_to=message)
        private = Message(_copy(message.content), metadata=message.metadata)  # type: ignore[call-overload]
        try:
            reply = client_app(private, self.context)
        except Exception as error:  # whatever a ClientApp raises becomes its reply, as in Flower
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
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

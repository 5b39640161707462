"""A device of an emulated fleet: it runs the ClientApp, and says when the reply arrives."""

import sys
from dataclasses import dataclass
from math import inf
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from flwr_hetero import keys
from flwr_hetero._flwr import CLIENT_APP_RAISED
from flwr_hetero.client.data_pass import Stream
from flwr_hetero.client.device import DeviceProfile
from flwr_hetero.client.emulation import device_rng, in_config, reply_if_away, stamp
from flwr_hetero.fleet.faults import Fault, corrupt

Answer = tuple[float, Message | None]
"""When a reply arrives, and the reply; None if there is none."""


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
        latency_s = sum(fault.delay_s for fault in faults if fault.kind == "late")
        if reply.has_content():
            times: Any = reply.content[keys.TIMING]
            latency_s += times[keys.TRAIN_TIME] + times[keys.TRANSFER_TIME]
        # as a SuperNode, which takes a message when it is through with the one before
        self.free_at_s = max(self.free_at_s, now_s) + latency_s
        return self.free_at_s, reply

    def _run(self, message: Message, client_app: ClientApp, faults: list[Fault]) -> Message:
        def fail(reason: str) -> Message:
            return Message(Error(CLIENT_APP_RAISED, reason), reply_to=message)

        if any(fault.kind == "errs" for fault in faults):
            return fail("injected error")
        records: dict[str, Any] = dict(message.content.items())
        copy = RecordDict({name: type(record)(dict(record)) for name, record in records.items()})
        # a ClientApp cannot change what other nodes see; arrays are immutable bytes, and shared
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

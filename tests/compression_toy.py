"""What the tests of compression on a fleet share: nodes that step towards goals of their own."""

import numpy as np
import quadratics
from flwr.app import Array, ArrayRecord
from toy import partition_of

from flwr_hetero.compression import wire
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import hetero

SIZE = 300


def goals_of(nodes, size=SIZE):
    return np.random.default_rng(0).normal(size=(nodes, size)).astype(np.float32)


def first(size=SIZE):
    return ArrayRecord({"x": Array(np.zeros(size, np.float32))})


def only_on(partitions, mod=hetero):
    """Make a mod that only some nodes have."""

    def some(message, context, call_next):
        if partition_of(context) in partitions:
            return mod(message, context, call_next)
        return call_next(message, context)

    return some


def packed_in(content):
    records = content.array_records.values()
    return [name for each in records for name, a in each.items() if a.stype in wire.STYPES]


class Wire(LocalGrid):
    """Nodes with the mod, unless told otherwise; keep whether packed arrays go each way."""

    def __init__(self, goals, speeds=None, mods=(hetero,), **settings):
        app = quadratics.app(goals, [100] * len(goals), 0.1, mods=mods)
        speeds = speeds or [1.0] * len(goals)
        self.down = []
        self.up = []
        profiles = [DeviceProfile(speed, seconds_per_example=1.0) for speed in speeds]
        super().__init__(app, profiles, **settings)

    def push_messages(self, messages):
        messages = list(messages)
        ids = super().push_messages(messages)
        for message in messages:
            node = message.metadata.dst_node_id
            reply = self.pending[message.metadata.message_id].reply
            self.down.append((node - 1000, packed_in(message.content)))
            self.up.append((node - 1000, packed_in(reply.content) if reply.has_content() else None))
        return ids

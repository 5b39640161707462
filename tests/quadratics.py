"""Nodes that descend on |x - goal|^2 / 2, and a grid that sees who is at work."""

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from toy import partition_of, reply_with

from flwr_hetero._flwr import MESSAGE_UNAVAILABLE
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero_studies.core.quiet import only_errors

STEPS = 10
"""Steps of a node that gets no number of them."""


def fedavg(**settings):
    return FedAvg(**{"fraction_evaluate": 0.0} | settings)


def start(x=0.0):
    return ArrayRecord({"x": Array(np.atleast_1d(np.array(x, float)))})


def app(goals, examples, lr, claims=None, mods=(), curvatures=None):
    """Make a ClientApp; a reply takes 1 s for each step and unit of speed.

    ``claims``: partition to what it says of its examples processed; ``curvatures``: of each loss.
    """

    def train(message, context):
        partition = partition_of(context)
        steps = int(message.content["config"].get("num-steps", STEPS))
        x = message.content["arrays"]["x"].numpy()
        goal = goals[partition]
        metrics = {
            "num-examples": examples[partition],
            "num-steps": steps,
            "examples-processed": (claims or {}).get(partition, steps),
        }
        rate = lr * (1.0 if curvatures is None else curvatures[partition])
        return reply_with(message, metrics, {"x": Array(goal + (1 - rate) ** steps * (x - goal))})

    def evaluate(message, context):
        partition = partition_of(context)
        off = message.content["arrays"]["x"].numpy() - goals[partition]
        metrics = {"num-examples": examples[partition], "eval-loss": float(off @ off)}
        return reply_with(message, metrics)

    app = ClientApp(mods=list(mods))
    app.train()(train)
    app.evaluate()(evaluate)
    return app


def answers(reply):
    """Say whether a node answers ever, and it is not the grid that does when its time is over."""
    return reply.has_content() or reply.error.code != MESSAGE_UNAVAILABLE


class Watched(LocalGrid):
    """See what is sent when, and that nothing is sent to a node at work."""

    strict = True

    def __init__(
        self, goals, speeds, *, lr=0.1, examples=None, claims=None, jitter=0.0, curvatures=None,
        **more,
    ):  # fmt: skip
        examples = examples or [100] * len(goals)
        devices = [DeviceProfile(s, jitter=jitter, seconds_per_example=1.0) for s in speeds]
        super().__init__(app(goals, examples, lr, claims, (), curvatures), devices, **more)
        self.sent = []
        self.received = []
        self.at_work = {}
        self.training = set()
        self.most = 0

    def push_messages(self, messages):
        messages = list(messages)
        for message in messages:
            node_id = message.metadata.dst_node_id
            assert not self.strict or node_id not in self.at_work.values(), "the node is at work"
            number = message.content["config"]["server-round"]
            kind = message.metadata.message_type
            self.sent.append((self.virtual_time_s, node_id - 1000, kind, int(number)))
        ids = list(super().push_messages(messages))
        for message_id, message in zip(ids, messages, strict=True):
            if answers(self.pending[message_id].reply):
                self.at_work[message_id] = message.metadata.dst_node_id
                self.training |= {message_id} if message.metadata.message_type == "train" else set()
        self.most = max(self.most, len(self.training & self.at_work.keys()))
        return ids

    def _collect(self, ids):
        replies = super()._collect(ids)
        for reply in replies:
            self.at_work.pop(reply.metadata.reply_to_message_id, None)
            self.received.append((self.virtual_time_s, reply.metadata.src_node_id - 1000))
        return replies


def models(strategy, grid, merges, x=0.0, **settings):
    """Run a strategy; return x after each merge, the initial one first, and the result."""
    found = []

    def watch(number, arrays):
        found.append(arrays["x"].numpy())

    with only_errors():
        result = strategy.start(grid, start(x), merges, evaluate_fn=watch, **settings)
    return np.squeeze(found, axis=1) if found[0].shape == (1,) else np.array(found), result

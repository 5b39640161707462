"""Bytes and device-seconds of the history: all that was sent and worked, whatever became of it."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import FedAvg
from quadratics import app, models
from recording import History

from flwr_hetero import keys
from flwr_hetero._flwr import be_server_task, set_message_id
from flwr_hetero.exchange.queue import Costs
from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.records import payload_bytes
from flwr_hetero.strategy import FedBuff, LocalSteps, TiFL
from flwr_hetero_studies.rivals import DeadlineSelection


def sent(name, node=1):
    """Make an instruction of 8 bytes that has been sent."""
    be_server_task(1, 1, 1)
    message = Message(RecordDict({"config": ConfigRecord({"x": 1})}), node, "train")
    set_message_id(message, name)
    return message


def reply(message, took_s=None):
    """Make a reply of 4 values, and a timing record if it says how long it took."""
    content = RecordDict({"arrays": ArrayRecord([np.zeros(1)])})
    if took_s is not None:
        content[keys.TIMING] = ConfigRecord({keys.TRAIN_TIME: took_s, keys.TRANSFER_TIME: 0.0})
    return Message(content, reply_to=message)


def test_costs_by_hand():
    costs = Costs()
    (a, b, c) = [sent(name) for name in "abc"]
    costs.sent([a, b, c], 10.0, timeout_s=7.0)
    costs.answered([reply(a, 2.0)], 13.0)  # it was at work for 2 of 3 s
    assert costs.until(14.0) == {
        "bytes_down": 24,
        "bytes_up": payload_bytes(reply(a, 2.0).content),
        "device_s": 2 + 4 + 4,
    }
    costs.answered([reply(b, 9.0)], 15.0)  # no node works longer than its reply is away
    assert costs.until(30.0) == {
        "bytes_down": 0,
        "bytes_up": payload_bytes(reply(b, 9.0).content),
        "device_s": 1 + 3,  # the third was given up at 17
    }
    costs.answered([reply(c)], 30.0)  # and is there after all
    assert costs.until(31.0)["device_s"] == 13


class Counted(LocalGrid):
    """Note all intervals of work and all bytes."""

    def __init__(self, speeds, **settings):
        devices = [DeviceProfile(speed, seconds_per_example=1.0) for speed in speeds]
        nodes = app([1.0] * len(speeds), [100] * len(speeds), lr=0.1)
        super().__init__(nodes, devices, **settings)
        self.work = {}
        self.down = 0
        self.up = 0

    def push_messages(self, messages):
        messages = list(messages)
        ids = super().push_messages(messages)
        for message_id, message in zip(ids, messages, strict=True):
            self.down += payload_bytes(message.content)
            self.work[message_id] = self.virtual_time_s, self.pending[message_id].arrival_s
        return ids

    def _collect(self, ids):
        replies = super()._collect(ids)
        self.up += sum(payload_bytes(reply.content) for reply in replies if reply.has_content())
        return replies


SPEEDS = [8.0, 4.1, 4.0, 1.0, 0.9, 0.3]


@pytest.mark.parametrize(
    ("make", "rounds", "timeout_s"),
    [
        (lambda: FedBuff(FedAvg()), 15, 60),
        (lambda: FedBuff(LocalSteps(FedAvg(), 5, budget="deadline"), concurrency=3), 15, 60),
        (lambda: TiFL(FedAvg(), 2, 3, profiling="phase", sync_rounds=1, warmup_rounds=0), 9, 600),
        (lambda: TiFL(FedAvg(), 2, 3), 9, 600),
        (lambda: DeadlineSelection(FedAvg(), deadline_s=20.0), 5, 600),
    ],
    ids=["fedbuff", "few in flight", "tifl", "tifl in training", "deadline"],
)
def test_all_that_nodes_did_is_in_the_history(make, rounds, timeout_s):
    """One node dies in round 2."""
    faults = [Fault(4, "dies", first_round=2)]
    history = History(make())
    grid = Counted(SPEEDS, faults=faults)
    models(history, grid, rounds, timeout=timeout_s)
    sums = (sum(r[key] for r in history.records) for key in ("bytes_down", "bytes_up", "device_s"))
    began_s, over_s = np.array(list(grid.work.values())).T
    end_s = grid.virtual_time_s  # what has not come by then counts up to the time-out
    worked_s = np.where(over_s <= end_s, over_s, np.minimum(began_s + timeout_s, end_s)) - began_s
    assert tuple(sums) == (grid.down, grid.up, pytest.approx(worked_s.sum(), rel=1e-6))

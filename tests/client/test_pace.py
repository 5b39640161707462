import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from toy import toy_app

from flwr_hetero import keys
from flwr_hetero.client.device import DeviceProfile
from flwr_hetero.client.emulation import stamp
from flwr_hetero.client.timing import Pace, note_pace, read_pace
from flwr_hetero.fleet import LocalGrid
from flwr_hetero.mod import timing

ARRAYS = ArrayRecord({"w": Array(np.zeros(1000, np.float32))})
LINK = DeviceProfile(uplink_mbps=0.1, downlink_mbps=0.1, seconds_per_example=0.03)


def context() -> Context:
    return Context(1, 1000, {"partition-id": 0}, RecordDict(), {})


def exchange(message_type: str = "train", **metrics: float) -> tuple[Message, Message]:
    LocalGrid(toy_app(), profiles=[DeviceProfile()])  # so that messages can be made
    message = Message(RecordDict({"arrays": ARRAYS}), 1000, message_type)
    content = RecordDict({"metrics": MetricRecord({"num-examples": 10, **metrics})})
    return message, Message(content, reply_to=message)


def stamped(node: Context, **metrics: float) -> tuple[float, float]:
    message, reply = exchange(**metrics)
    stamp(message, reply, node, LINK, np.random.default_rng(0))
    record = reply.content[keys.TIMING]
    return record[keys.TRAIN_TIME], record[keys.TRANSFER_TIME]


def test_an_emulated_node_learns_its_link_and_speed() -> None:
    node = context()
    _, transfer_s = stamped(node)
    pace = read_pace(node)
    assert pace == Pace(pytest.approx(transfer_s), pytest.approx(0.01))
    assert transfer_s > 0.3


def test_scoring_behind_the_network_costs_what_is_not_hidden() -> None:
    plain_s, transfer_s = stamped(context())
    fits = int(transfer_s / 0.01)
    hidden_s, _ = stamped(context(), **{keys.EXAMPLES_HIDDEN: fits - 1})
    assert hidden_s == plain_s
    longer_s, _ = stamped(context(), **{keys.EXAMPLES_HIDDEN: fits + 100})
    assert longer_s == pytest.approx(plain_s + (fits + 100) * 0.01 - transfer_s, rel=0.01)


def test_scoring_before_training_costs_all_of_it() -> None:
    plain_s, _ = stamped(context())
    scored_s, _ = stamped(context(), **{keys.EXAMPLES_SCORED: 100})
    assert scored_s == pytest.approx(plain_s + 1.0)


def test_a_real_node_measures_the_time_from_reply_to_instruction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, clock = context(), iter([10.0, 12.0, 17.0, 18.0, 30.0, 31.0, 33.0, 34.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    for message_type in ("train", "evaluate", "train"):
        message, reply = exchange(message_type)
        timing(message, node, lambda *_, reply=reply: reply)
    assert read_pace(node) == Pace(5.0, 0.0)  # up to the evaluation; none since then
    message, reply = exchange()
    timing(message, node, lambda *_: reply)
    assert read_pace(node).idle_s == 3.5  # smoothed with the 2 s after the second training


def test_an_emulated_nodes_real_clock_says_nothing() -> None:
    grid = LocalGrid(toy_app(), profiles=[LINK])
    for _ in range(2):
        message, _ = exchange()
        grid.send_and_receive([message])
    state = grid.context(1000).state[keys.PACE]
    assert keys.REPLIED_AT not in state
    assert state[keys.EXAMPLE_TIME] == pytest.approx(0.03)


def test_nothing_known_nothing_told() -> None:
    node = context()
    assert read_pace(node) is None
    node.state[keys.PACE] = ConfigRecord({keys.IDLE_TIME: "soon", keys.EXAMPLE_TIME: math.nan})
    assert read_pace(node) == Pace(0.0, 0.0)


def test_each_half_is_learnt_by_itself() -> None:
    node = context()
    note_pace(node, math.nan, 3.0)
    note_pace(node, 4.0, math.nan)
    assert read_pace(node) == Pace(2.0, 1.0)

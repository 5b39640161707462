from math import inf, nan
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from toy import toy_app

from flwr_hetero import keys
from flwr_hetero.client import timing as timing_module
from flwr_hetero.client.timing import NodePace, note_pace, read_pace
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import timing


@pytest.fixture
def context():
    LocalGrid(toy_app(), profiles=[DeviceProfile()])  # so that messages can be made
    return Context(1, 1000, {"partition-id": 1}, RecordDict(), {})


def respond(message, context):
    metrics = MetricRecord({"num-examples": 50})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def ask(context, message_type="train", app=respond):
    return timing(Message(RecordDict(), 1000, message_type), context, app)


@pytest.fixture
def clock(monkeypatch):
    """Give a function that sets what the monotonic clock reads from then on."""

    def read(*seconds):
        found = iter(seconds)
        fake = SimpleNamespace(monotonic=lambda: next(found))
        monkeypatch.setattr(timing_module, "time", fake)

    return read


def test_timing_reads_the_monotonic_clock(context, clock):
    clock(10.0, 12.5)
    reply = ask(context)
    record = reply.content[keys.TIMING]
    assert (record[keys.TRAIN_TIME], record[keys.EMULATED]) == (2.5, False)
    assert record[keys.PARTITION_ID] == 1
    assert dict(reply.content["metrics"]) == {"num-examples": 50}


def test_app_that_returns_nothing_is_told(context):
    """Else its SuperNode would wait for a reply, and take no message any more."""
    with pytest.raises(TypeError, match="the ClientApp returned NoneType, not a Message"):
        ask(context, "query", lambda message, context: None)


def test_pace_is_the_time_from_reply_to_message(context, clock):
    clock(10.0, 12.0, 17.0, 18.0, 30.0, 31.0, 33.0, 34.0)
    for message_type in ("train", "evaluate", "train"):
        ask(context, message_type)
    assert read_pace(context) == NodePace(5.0, 0.0)  # up to the evaluation; none since then
    ask(context)
    assert read_pace(context).idle_s == 3.5  # smoothed with the 2 s after the second training


def test_pace_of_nothing_known(context):
    assert read_pace(context) is None
    context.state[keys.PACE] = ConfigRecord({keys.IDLE_TIME: "soon", keys.EXAMPLE_TIME: nan})
    assert read_pace(context) == NodePace(0.0, 0.0)


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        *[([(2.0, 3.0)], (2.0, 1.0)), ([(nan, -1.0)], (0.0, 0.0))],
        *[([(2.0, 3.0), (1.0, 0.0)], (1.5, 0.5)), ([(nan, 3.0), (4.0, nan)], (2.0, 1.0))],
        *[([(2.0, 3.0), bad], (2.0, 1.0)) for bad in ((nan, nan), (inf, inf), (-1.0, -1.0))],
    ],
)
def test_note_pace_is_a_moving_average(context, rounds, expected):
    for idle_s, example_s in rounds:
        note_pace(context, idle_s, example_s)
    assert read_pace(context) == expected

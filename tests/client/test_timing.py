"""What a reply reports of its time, on real and on emulated devices."""

import json
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from toy import reply_with, toy_app

from flwr_hetero import keys
from flwr_hetero.client import emulation
from flwr_hetero.client import timing as timing_module
from flwr_hetero.client.emulation import device_rng, stamp, work
from flwr_hetero.client.timing import NodePace, read_pace, times_beside
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import emulated_device, timing

ARRAYS = ArrayRecord({"w": Array(np.zeros(1000, np.float32))})
LINK = DeviceProfile(uplink_mbps=0.1, downlink_mbps=0.1, seconds_per_example=0.03)


@pytest.fixture(autouse=True)
def grid():
    return LocalGrid(toy_app(), profiles=[LINK])  # so that messages can be made


@pytest.fixture
def emulate(monkeypatch):
    """Give a function that asks an emulated device for a reply."""

    def ask(fleet, *, partition=1, simulated=True):
        monkeypatch.setattr(emulation, "in_simulation", lambda: simulated)
        context = node(partition, fleet=fleet)
        return emulated_device(instruction(), context, answer), emulation.is_emulated(context)

    return ask


def node(partition=1, **run_config):
    node_config = {"partition-id": partition, "num-partitions": 5}
    return Context(1, 1000, node_config, RecordDict(), run_config)


def instruction(kind="train", server_round=3, **config):
    config = ConfigRecord({"server-round": server_round, **config})
    return Message(RecordDict({"arrays": ARRAYS, "config": config}), 1000, kind)


def answer(message, context=None, **metrics):
    return reply_with(message, {"num-examples": 50, **metrics})


def ask(context, kind="train", app=answer):
    return timing(instruction(kind), context, app)


def stamped(context=None, **metrics):
    message = instruction()
    reply = answer(message, **metrics)
    stamp(message, reply, context or node(), LINK, np.random.default_rng(0))
    record = reply.content[keys.TIMING]
    return record[keys.TRAIN_TIME], record[keys.TRANSFER_TIME]


@pytest.mark.parametrize(
    ("simulated", "fleet", "emulated"),
    [(True, "paper-5", True), (False, "paper-5", False), (True, "real", False)],
)
def test_emulated_device_follows_its_profile_in_a_simulation(emulate, simulated, fleet, emulated):
    reply, is_emulated = emulate(fleet, partition=4, simulated=simulated)
    record = reply.content[keys.TIMING]
    assert record[keys.EMULATED] == is_emulated == emulated
    if emulated:
        assert record[keys.TRAIN_TIME] == pytest.approx(50 * 0.01 / 0.1)


def test_an_emulated_message_costs_transfer_time_or_is_not_answered(emulate, tmp_path):
    fleet = tmp_path / "fleet.toml"
    fleet.write_text("[[device]]\ncompute-factor = 0.5\nwait-s = 3.0\nstart-s = 2.0")
    record = emulate(str(fleet))[0].content[keys.TIMING]
    assert record[keys.TRAIN_TIME] == pytest.approx(50 * 0.01 / 0.5)
    assert record[keys.TRANSFER_TIME] == pytest.approx(3.0 + 2.0 / 0.5)
    away = tmp_path / "away.toml"
    away.write_text("[[device]]\navailability = 0.0")
    assert emulate(str(away))[0].error.code == 5


@pytest.mark.parametrize(
    ("metrics", "expected", "kind"),
    [
        ({}, (50, 0, 0), "train"),
        ({"examples-processed": 150}, (150, 0, 0), "train"),
        ({"examples-processed": 0, "examples-scored": 30}, (0, 30, 0), "train"),
        *[({"examples-processed": bad}, (1, 0, 0), "train") for bad in (-3, float("nan"))],
        ({keys.EXAMPLES_HIDDEN: 7}, (50, 0, 7), "train"),
        ({}, (0, 50, 0), "evaluate"),  # forward only
    ],
)
def test_work_is_what_the_reply_reports(metrics, expected, kind):
    assert work(answer(instruction(kind), **metrics)) == expected


def test_device_rng_depends_on_its_message_only():
    def draw(seed=0, partition=1, **message):
        return device_rng(seed, partition, instruction(**message)).random()

    assert draw() == draw()
    others = [draw(seed=1), draw(partition=2), draw(kind="evaluate"), draw(server_round=4)]
    assert len({draw(), *others, draw(**{keys.REPEAT: 1})}) == 6


def test_stamp_counts_scoring_that_the_network_does_not_hide():
    context = node()
    plain_s, transfer_s = stamped(context)
    assert read_pace(context) == NodePace(pytest.approx(transfer_s), pytest.approx(0.01))
    assert transfer_s > 0.3
    assert stamped(**{keys.EXAMPLES_SCORED: 100})[0] == pytest.approx(plain_s + 1.0)
    fits = int(transfer_s / 0.01)
    assert stamped(**{keys.EXAMPLES_HIDDEN: fits - 1})[0] == plain_s
    longer_s, _ = stamped(**{keys.EXAMPLES_HIDDEN: fits + 100})
    assert longer_s == pytest.approx(plain_s + (fits + 100) * 0.01 - transfer_s, rel=0.01)


@pytest.fixture
def clock(monkeypatch):
    """Give a function that sets what the monotonic clock reads from then on."""

    def read(*seconds):
        found = iter(seconds)
        fake = SimpleNamespace(monotonic=lambda: next(found))
        monkeypatch.setattr(timing_module, "time", fake)

    return read


def test_timing_reads_the_monotonic_clock(clock):
    clock(10.0, 12.5)
    reply = ask(node())
    record = reply.content[keys.TIMING]
    assert (record[keys.TRAIN_TIME], record[keys.EMULATED]) == (2.5, False)
    assert record[keys.PARTITION_ID] == 1
    assert dict(reply.content["metrics"]) == {"num-examples": 50}


def test_app_that_returns_nothing_is_told():
    """Else its SuperNode would wait for a reply, and take no message any more."""
    with pytest.raises(TypeError, match="the ClientApp returned NoneType, not a Message"):
        ask(node(), "query", lambda message, context: None)


def test_pace_is_the_time_from_reply_to_message(clock):
    context = node()
    clock(10.0, 12.0, 17.0, 18.0, 30.0, 31.0, 33.0, 34.0)
    for message_type in ("train", "evaluate", "train"):
        ask(context, message_type)
    assert read_pace(context) == NodePace(5.0, 0.0)  # up to the evaluation; none since then
    ask(context)
    assert read_pace(context).idle_s == 3.5  # smoothed with the 2 s after the second training


@pytest.fixture
def told(monkeypatch, tmp_path):
    """Give a function that asks in the process of a message, with what its SuperNode has told."""

    def ask_there(text=None, called_s=100.0, started_s=90.0):
        file = tmp_path / "times.json"
        monkeypatch.setenv(keys.TIMES_FILE, str(file))
        if text is not None:
            file.write_bytes(text if isinstance(text, bytes) else json.dumps(text).encode())
        monkeypatch.setattr(timing_module, "process_start_s", lambda: started_s)
        return times_beside(called_s)

    return ask_there


TOLD = {keys.RECEIVE_TIME: 0.5, keys.SEND_TIME: 0.25}


@pytest.mark.parametrize(
    ("received_s", "started_s", "start_s"),
    [
        (80.0, 90.0, 10.0),
        (97.5, 90.0, 2.5),  # it started while the message was on its way
        (101.0, 90.0, 0.0),
        (80.0, None, None),
    ],
)
def test_times_beside_the_app(told, received_s, started_s, start_s):
    found = told({**TOLD, keys.RECEIVED_AT: received_s}, started_s=started_s)
    assert found == TOLD | ({} if start_s is None else {keys.START_TIME: start_s})


def test_only_the_process_of_a_message_is_divided(monkeypatch):
    monkeypatch.setattr(timing_module, "times_beside", lambda called_s: TOLD)
    assert not TOLD.keys() & ask(node()).content[keys.TIMING].keys()
    monkeypatch.setattr(sys, "argv", ["/usr/bin/flwr-clientapp"])
    assert ask(node()).content[keys.TIMING].items() >= TOLD.items()
    assert entry_points(group="console_scripts", name="flwr-clientapp")

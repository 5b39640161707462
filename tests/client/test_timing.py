import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from toy import toy_app

from flwr_hetero import keys
from flwr_hetero.client import emulation as emulation_module
from flwr_hetero.client.device import DeviceProfile
from flwr_hetero.client.emulation import device_rng, work
from flwr_hetero.fleet import LocalGrid
from flwr_hetero.mod import emulated_device, load_state, save_state, timing
from flwr_hetero.records import payload_bytes


@pytest.fixture
def message():
    LocalGrid(toy_app(), profiles=[DeviceProfile()])  # so that messages can be made
    config = ConfigRecord({"server-round": 3})
    return Message(RecordDict({"config": config}), 1000, "train")


def context(partition=1, **run_config):
    node_config = {"partition-id": partition, "num-partitions": 5}
    return Context(1, 1000, node_config, RecordDict(), run_config)


def answer(**metrics):
    def call_next(message, context):
        content = RecordDict({"metrics": MetricRecord({"num-examples": 50, **metrics})})
        return Message(content, reply_to=message)

    return call_next


def test_timing_reads_the_monotonic_clock(message, monkeypatch):
    clock = iter([10.0, 12.5])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    reply = timing(message, context(), answer())
    record = reply.content[keys.TIMING]
    assert (record[keys.TRAIN_TIME], record[keys.EMULATED]) == (2.5, False)
    assert record[keys.PARTITION_ID] == 1


def test_timing_leaves_the_metrics_alone(message):
    reply = timing(message, context(), answer())
    assert dict(reply.content["metrics"]) == {"num-examples": 50}


def test_emulated_device_follows_its_profile(message, monkeypatch):
    monkeypatch.setattr(emulation_module, "in_simulation", lambda: True)
    reply = emulated_device(message, context(partition=4, fleet="paper-5"), answer())
    record = reply.content[keys.TIMING]
    assert record[keys.EMULATED] is True
    assert record[keys.TRAIN_TIME] == pytest.approx(50 * 0.01 / 0.1)


@pytest.mark.parametrize(
    ("simulated", "fleet"), [(False, "paper-5"), (True, "real"), (False, "real")]
)
def test_outside_a_simulation_the_clock_counts(message, monkeypatch, simulated, fleet):
    monkeypatch.setattr(emulation_module, "in_simulation", lambda: simulated)
    reply = emulated_device(message, context(fleet=fleet), answer())
    assert reply.content[keys.TIMING][keys.EMULATED] is False


def test_a_device_that_is_away_answers_with_an_error(message, monkeypatch, tmp_path):
    monkeypatch.setattr(emulation_module, "in_simulation", lambda: True)
    fleet = tmp_path / "fleet.toml"
    fleet.write_text("[[device]]\navailability = 0.0")
    reply = emulated_device(message, context(fleet=str(fleet)), answer())
    assert reply.error.code == 5


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({}, (50, 0)),
        ({"examples-processed": 150}, (150, 0)),
        ({"examples-processed": 0, "examples-scored": 30}, (0, 30)),
        ({"examples-processed": -3}, (1, 0)),
        ({"examples-processed": float("nan")}, (1, 0)),
    ],
)
def test_work_is_what_the_reply_reports(message, metrics, expected):
    assert work(answer(**metrics)(message, None)) == expected


def test_evaluation_only_goes_forward(message):
    evaluate = Message(message.content, 1000, "evaluate")
    assert work(answer()(evaluate, None)) == (0, 50)


def test_jitter_depends_on_seed_node_round_and_kind_only(message):
    def draw(seed=0, partition=1, kind="train", server_round=3):
        config = ConfigRecord({"server-round": server_round})
        return device_rng(
            seed, partition, Message(RecordDict({"config": config}), 7, kind)
        ).random()

    assert draw() == draw()
    others = [draw(seed=1), draw(partition=2), draw(kind="evaluate"), draw(server_round=4)]
    assert len({draw(), *others}) == 5


def test_payload_counts_arrays_bytes_and_numbers():
    arrays = ArrayRecord({"w": Array(np.zeros(1000, np.float32))})
    config = ConfigRecord({"order": b"12345", "lr": 0.1, "name": "abc", "list": [1, 2, 3]})
    content = RecordDict({"arrays": arrays, "config": config})
    assert payload_bytes(content) == len(arrays["w"].data) + 5 + 8 + 3 + 24


def test_state_comes_back_as_it_was():
    where = context()
    state = {
        "order": np.arange(4),
        "cache": np.ones(3, np.float32),
        "n": 3,
        "rng": "{}",
        "on": True,
    }
    save_state(where, "sampler", state)
    back = load_state(where, "sampler")
    assert back.keys() == state.keys()
    assert all(np.array_equal(back[key], state[key]) for key in state)
    assert back["cache"].dtype == np.float32


def test_lost_or_damaged_state_is_none():
    where = context()
    assert load_state(where, "sampler") is None
    save_state(where, "sampler", {"order": np.arange(4)})
    record = where.state.array_records["flwr-hetero.sampler.arrays"]
    record["order"] = Array("int64", (4,), "numpy.ndarray", b"torn")
    assert load_state(where, "sampler") is None

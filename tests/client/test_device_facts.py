import sys
from types import SimpleNamespace

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord
from toy import toy_app, toy_arrays

from flwr_hetero import keys
from flwr_hetero.client.timing import device_facts
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import timing
from flwr_hetero.strategy import TiFL, Wrapper


class Board:
    """As jetson-stats 4 shows a board."""

    def __init__(self):
        self.board = {"hardware": {"Model": "NVIDIA Jetson Orin Nano"}}
        self.nvpmodel = "15W"
        self.temperature = {"cpu": {"temp": 48.5}, "gpu": {"temp": 51.0}, "cv": {"temp": -256}}

    def __enter__(self):
        return self

    def __exit__(self, *problem):
        return None


@pytest.fixture
def jetson(monkeypatch):
    def become(board):
        monkeypatch.setitem(sys.modules, "jtop", SimpleNamespace(jtop=lambda: board))

    return become


def test_a_jetson_says_what_changes_its_speed(jetson):
    jetson(Board())
    assert device_facts() == {
        "model": "NVIDIA Jetson Orin Nano", "power-mode": "15W", "temperature-c": 51.0,
    }  # fmt: skip


def test_what_is_missing_is_left_out(jetson):
    board = Board()
    board.temperature = {"cv": {"temp": -256}}
    board.board = {}
    jetson(board)
    assert device_facts() == {"power-mode": "15W"}


def test_a_service_that_does_not_run_says_nothing(jetson):
    jetson(None)  # entering it raises
    assert device_facts() == {}


def first_record(mods=(timing,)):
    records = []
    tifl = TiFL(clients_per_round=2, num_tiers=1, sync_rounds=1, warmup_rounds=0)
    tifl.on_round_end = lambda run, record: records.append(record)
    grid = LocalGrid(toy_app(mods=mods), [DeviceProfile()] * 2)
    tifl.start(grid, toy_arrays(), num_rounds=1)
    return records[0]["tifl"]


def test_the_history_has_the_facts_of_the_profiling(jetson):
    assert "devices" not in first_record()
    jetson(Board())
    devices = first_record()["devices"]
    assert sorted(devices) == ["node-0", "node-1"]
    assert devices["node-0"]["temperature-c"] == 51.0


def test_only_profiling_asks_the_board(jetson):
    seen = []

    class See(Wrapper):
        def on_replies(self, server_round, replies):
            seen.extend(keys.DEVICE in reply.content for reply in replies)
            return replies

    jetson(Board())
    grid = LocalGrid(toy_app(), [DeviceProfile()] * 2)
    See().start(grid, toy_arrays(), num_rounds=1)
    assert seen == [False, False]


def test_nonsense_stays_out_of_the_history():
    def spoil(message, context, call_next):
        reply = call_next(message, context)
        facts = {f"key-{i}" * 99: "x" * 999 for i in range(99)}
        facts = {"list": [1.0, 2.0], "nan": float("nan"), **facts}
        one = context.node_config["partition-id"] == 1
        junk = ArrayRecord({"a": Array(toy_arrays()["w"].numpy())})
        reply.content[keys.DEVICE] = junk if one else ConfigRecord(facts)
        return reply

    devices = first_record([spoil, timing])["devices"]
    assert list(devices) == ["node-0"]
    assert 1 <= len(devices["node-0"]) <= 8
    assert not {"list", "nan"} & devices["node-0"].keys()
    assert all(len(str(text)) <= 80 for fact in devices["node-0"].items() for text in fact)

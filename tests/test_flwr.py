"""Flower's undocumented parts are what ``_flwr.py`` takes them for."""

import re
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg

from flwr_hetero import _flwr

PACKAGE = Path(_flwr.__file__).parent
UNDOCUMENTED = (
    r"(?m)^ *(?:from|import) flwr\b(?!\.(?:app|clientapp|serverapp|serverapp\.strategy) import).*"
)


def test_no_other_file_uses_undocumented_flwr():
    texts = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    found = {path.name for path, text in texts.items() if re.search(UNDOCUMENTED, text)}
    assert found == {"_flwr.py"}


def test_version_is_pinned_and_error_codes_are_those_tried():
    pins = (PACKAGE.parent / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"flwr=={_flwr.TRIED_WITH}" in pins
    assert _flwr.CLIENT_APP_RAISED == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert _flwr.NODE_UNAVAILABLE == ErrorCode.NODE_UNAVAILABLE
    assert _flwr.MESSAGE_UNAVAILABLE == ErrorCode.MESSAGE_UNAVAILABLE


def test_simulation_grid_by_name():
    from flwr.superlink.grid.inmemory_grid import InMemoryGrid

    assert _flwr.is_simulation_grid(InMemoryGrid.__new__(InMemoryGrid))


def test_identity_of_a_server_app_is_kept(monkeypatch):
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(_flwr.TaskIdentity, name, None)
    _flwr.be_server_task(run_id=7, task_id=1, node_id=1)
    _flwr.be_server_task(run_id=8, task_id=2, node_id=2)  # a LocalGrid inside this ServerApp
    assert [getattr(_flwr.TaskIdentity, n) for n in ("run_id", "task_id", "node_id")] == [7, 1, 1]


def test_message_id_is_set(monkeypatch):
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(_flwr.TaskIdentity, name, 7)
    message = Message(RecordDict({"config": ConfigRecord()}), dst_node_id=5, message_type="train")
    _flwr.set_message_id(message, "abc")
    assert message.metadata.message_id == "abc"
    assert message.metadata.run_id == 7
    assert _flwr.new_run(7).run_id == 7


@pytest.mark.parametrize("name", ["FedXgbBagging", "FedXgbCyclic"])
def test_trees_are_known_by_name(name):
    strategy = getattr(flower, name)()
    assert _flwr.trains_trees(strategy)
    assert _flwr.format_of_trees(strategy) == ("json" if name == "FedXgbBagging" else "any")
    assert _flwr.trains_trees(type("Own", (type(strategy),), {})())
    assert _flwr.chooses_one_node(strategy) is (name == "FedXgbCyclic")
    assert not _flwr.trains_trees(FedAvg())

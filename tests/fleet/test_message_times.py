"""The times that a SuperNode takes to receive and send, and the file for its processes."""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from flwr_hetero import keys
from flwr_hetero.fleet import _flwr
from flwr_hetero.fleet.message_times import MessageTimes

MESSAGE = SimpleNamespace(metadata=SimpleNamespace(message_type="train"))


def read(times):
    return json.loads(times.file.read_text())


def test_a_message_is_told_the_last_send_of_its_type(tmp_path):
    times = MessageTimes(tmp_path / "times.json")
    times.received("train", 0.5)
    assert read(times).keys() == {keys.RECEIVE_TIME, keys.RECEIVED_AT}
    times.sent("train", 0.25)
    assert not times.file.exists()
    times.received("evaluate", 0.125)
    assert keys.SEND_TIME not in read(times)
    times.received("train", 1.5)
    assert (read(times)[keys.RECEIVE_TIME], read(times)[keys.SEND_TIME]) == (1.5, 0.25)
    assert [path.name for path in tmp_path.iterdir()] == ["times.json"]


class Clock:
    now_s = 0.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def node(monkeypatch):
    """Give Flower's module with two functions that take 3 and 7 s, and what is reported."""
    node = ModuleType("node")
    clock = Clock()
    reports = []

    def pull(state, receive, fails=False):
        found = receive()
        clock.now_s += 3.0
        return None if found is None or fails else 17

    def push(state, send):
        clock.now_s += 100.0
        send(MESSAGE, "tree", 0.0)
        clock.now_s += 7.0

    node._pull_and_store_message = pull
    node._push_messages = push
    monkeypatch.setitem(sys.modules, "flwr.supernode.start_client_internal", node)
    monkeypatch.setattr(_flwr, "time", clock)
    _flwr.time_messages(
        lambda *about: reports.append(("in", *about)),
        lambda *about: reports.append(("out", *about)),
    )
    return node, reports


def test_receiving_and_sending_are_timed_without_the_waits(node):
    node, reports = node
    for found, fails in ((None, False), ((MESSAGE, "tree"), True), ((MESSAGE, "tree"), False)):
        run_id = node._pull_and_store_message(state=1, receive=lambda m=found: m, fails=fails)
        assert run_id == (17 if found and not fails else None)
    node._push_messages(state=1, send=lambda *_: "sent")
    assert reports == [("in", "train", 3.0), ("out", "train", 7.0)]


def test_flowers_functions_are_there():
    """Those that are replaced, with what is wrapped given by name."""
    source = Path(find_spec("flwr").origin).parent / "supernode" / "start_client_internal.py"
    text = source.read_text(encoding="utf-8")
    for name, keyword in (("_pull_and_store_message", "receive"), ("_push_messages", "send")):
        assert re.search(rf"def {name}\((?s:.)*?\b{keyword}: Callable", text)
        assert re.search(rf" {name}\([^()]*\b{keyword}={keyword},", text)

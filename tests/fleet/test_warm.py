"""Processes of a warm node, without Flower: ``warm_node.py`` says what apps and messages do."""

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import flwr
import pytest
from fleet.warm_node import COLD, SCENARIOS
from flwr.app import Context, RecordDict
from flwr.supercore.run import Run

from flwr_hetero import cli, keys
from flwr_hetero.fleet import _flwr, supernode
from flwr_hetero.fleet.forks import NVML

SCRIPT = Path(__file__).with_name("warm_node.py")


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """Return what has failed in each scenario, what was printed, and the folder."""
    folder = tmp_path_factory.mktemp("node")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # Another test in this process may have set it.
    environment.pop(NVML, None)
    done = subprocess.run(
        [sys.executable, SCRIPT, folder],
        capture_output=True, text=True, timeout=300, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found.json").read_text()), done.stdout, done.stderr, folder


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_processes_of_a_warm_node(node, scenario):
    assert node[0][scenario] == ""


@pytest.mark.parametrize("app", COLD)
def test_log_says_why_an_app_is_cold(node, app):
    part = node[2].partition(f"--- cold: {app}\n")[2].partition("---")[0]
    (said,) = re.findall(rf"^{app} is not warm, .*", part, re.MULTILINE)
    assert COLD[app] in said


def test_texts_are_written_once(node):
    assert node[2].count("the first parent has ended") == 1
    assert node[1].count("imported") == (node[3] / "plain.log").read_text().count("\n")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--superlink", "127.0.0.1:9092"], ""),
        (["--isolation", "subprocess"], ""),
        (["--cold"], "--cold was given"),
        (["--isolation", "process"], "others start the processes"),
        (["--isolation=process"], "others start the processes"),
        (["--allow-runtime-dependency-installation"], "installs the packages"),
    ],
)
def test_options_that_make_a_node_cold(options, why):
    result = supernode.why_cold(options)
    assert why in result
    assert bool(result) == bool(why)


@pytest.mark.parametrize(
    ("name", "replaced", "why"),
    [
        ("supernode.start_client_internal._push_messages", lambda state: None, "has no 'send:'"),
        ("supercore.superexec.run_superexec.AutoExecPlugin", None, "has no flwr.supercore.superex"),
        ("supernode.runtime.run_clientapp.run_clientapp", lambda: None, "has no 'token:'"),
    ],
)
def test_another_flwr_makes_a_node_cold(name, replaced, why, monkeypatch):
    assert supernode.why_cold([]) == ""
    monkeypatch.setattr(f"flwr.{name}", replaced)
    assert why in supernode.why_cold([])
    assert f"flwr {flwr.__version__}" in supernode.why_cold([])


@pytest.mark.parametrize("is_loaded", [True, False])
def test_process_of_a_message_installs_an_app_that_is_not_loaded(is_loaded, monkeypatch):
    process = import_module("flwr.supernode.runtime.run_clientapp")
    spec = SimpleNamespace(runtime_api_address="", token="t", insecure=True, parent_pid=None)
    spec.root_certificates_path = None
    steps = []

    def answer(token, **_):
        process.install_from_fab(b"files", skip_prompt=True)
        process.push_task_output("client")
        steps.append(token)

    monkeypatch.setattr(process, "push_task_output", lambda client: steps.append("push"))
    monkeypatch.setattr(process, "install_from_fab", lambda fab, **_: steps.append("install"))
    monkeypatch.setattr(process, "run_clientapp", answer)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(_flwr, "PROCESS", "pytest")
    _flwr.answer_message(spec, lambda: steps.append("end"), is_loaded=is_loaded)
    assert steps == [*([] if is_loaded else ["install"]), "push", "end", "t"]


def test_command_passes_options_on(monkeypatch):
    calls = []
    options = ["--superlink", "a:1", "--node-config", "b=1 c='d'", "--help"]
    monkeypatch.setattr(supernode, "main", calls.append)
    assert cli.main(["supernode", *options]) == 0
    assert calls == [options]


@pytest.fixture
def node_module(monkeypatch):
    """Give Flower's module of the SuperNode, whose changes are undone after the test."""
    module = import_module("flwr.supernode.start_client_internal")
    connection = import_module("flwr.supernode.fleet_http_connection")
    names = ("_pull_and_store_message", "_push_messages", "get_fused_config_from_fab")
    for name in (*names, "time", "subprocess"):
        monkeypatch.setattr(module, name, getattr(module, name))
    kept = connection.NodeAuthHttpInterceptor
    monkeypatch.setattr(connection, "NodeAuthHttpInterceptor", kept)
    return module


@pytest.mark.parametrize("has_replied", [False, True])
def test_launchers_that_end_are_started_again(
    has_replied, tmp_path, node_module, monkeypatch, caplog
):
    """Flower's SuperExec is started instead of a third one that ends before the first reply."""
    monkeypatch.setattr(supernode, "RESTART_S", 0.0)
    monkeypatch.setattr(sys, "executable", "/bin/true")
    launcher = supernode.Launcher(tmp_path)
    launcher.has_replied = has_replied
    node_module.subprocess.Popen(["/bin/echo", "superexec"])
    while len(launcher.processes) < 4 and not launcher.is_cold:
        node_module.time.sleep(0.01)
    node_module.time.sleep(0.01)
    launcher.wake(1)
    assert launcher.processes[0].returncode is None  # Its id is taken until the node ends.
    commands = [process.args[0] for process in launcher.processes if not process.wait()]
    assert commands[:3] == ["/bin/true", "/bin/true", "/bin/true" if has_replied else "/bin/echo"]
    assert "the launcher has ended and is started again" in caplog.text
    assert caplog.text.count("cold from now on") == (not has_replied)


def test_app_that_cannot_be_saved_is_cold(tmp_path, caplog):
    woken = []
    watcher = supernode.Watcher(tmp_path / "none", SimpleNamespace(wake=woken.append))
    app = _flwr.App("me/app", "1.2.3", "0123456789", b"", Context(0, 7, {}, RecordDict(), {}))
    watcher.fetched(5, app)
    assert "me/app is not warm, so that each message starts a new process" in caplog.text
    assert woken == [5]


def test_node_that_cannot_be_watched_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr("flwr.supernode.start_client_internal._push_messages", lambda state: None)
    assert not supernode.watch([]).is_refused
    assert caplog.text.count("this node is cold, as Flower's own nodes are: ") == 1
    assert caplog.text.count("this node does not explain its faults: ") == 1


def test_flower_gives_by_name_what_is_wrapped(node_module):
    text = Path(node_module.__file__).read_text(encoding="utf-8")
    for name, keyword in (("_pull_and_store_message", "receive"), ("_push_messages", "send")):
        assert re.search(rf" {name}\([^()]*\b{keyword}={keyword},", text)
    assert "get_fused_config_from_fab(fab.content, run_info)" in text


class Clock:
    now_s = 0.0

    def monotonic(self):
        return self.now_s


def test_messages_of_a_node_are_watched(tmp_path, node_module, monkeypatch):
    """Flower's functions take 3 s to receive a message, and 7 s to send its reply."""
    clock = Clock()
    woken = []
    message = SimpleNamespace(
        metadata=SimpleNamespace(message_type="train", run_id=5), has_error=lambda: False
    )
    state = SimpleNamespace(get_node_id=lambda: 7)
    run = Run.create_empty(5)
    run.fab_id = "me/app"
    run.fab_version = "1.2.3"
    run.fab_hash = "0123456789"

    def pull(state, node_config, receive, is_new=True):
        if receive() is None:
            return None
        if is_new:
            node_module.get_fused_config_from_fab(b"files", run)
            assert woken == [5]
        clock.now_s += 3.0
        return 5

    def push(state, send):
        clock.now_s += 100.0
        send(message, "tree", 0.0)
        clock.now_s += 7.0

    def pulled(*messages, **options):
        received = node_module._pull_and_store_message(
            state=state, node_config={"a": 1}, receive=lambda: next(iter(messages), None), **options
        )
        return received, json.loads(watcher.times.read_text()) if watcher.times.exists() else None

    monkeypatch.setattr(_flwr, "time", clock)
    monkeypatch.setattr(supernode, "time", clock)
    monkeypatch.setattr(node_module, "_pull_and_store_message", pull)
    monkeypatch.setattr(node_module, "_push_messages", push)
    monkeypatch.setattr(node_module, "get_fused_config_from_fab", lambda fab_file, run: {"lr": 0.5})
    watcher = supernode.Watcher(tmp_path, SimpleNamespace(wake=woken.append))
    _flwr.watch_node(watcher)
    assert pulled() == (None, None)
    assert pulled((message, "tree")) == (5, {keys.RECEIVE_TIME: 3.0, keys.RECEIVED_AT: 3.0})
    assert woken == [5, 5]
    node_module._push_messages(state=state, send=lambda *_: "sent")
    assert pulled() == (None, None)
    times = {keys.RECEIVE_TIME: 3.0, keys.RECEIVED_AT: 113.0, keys.SEND_TIME: 7.0}
    assert pulled((message, "tree"), is_new=False) == (5, times)
    message.metadata.message_type = "evaluate"
    assert keys.SEND_TIME not in pulled((message, "tree"), is_new=False)[1]

    process = import_module("flwr.supernode.runtime.run_clientapp")
    steps = []
    monkeypatch.setattr(process, "install_from_fab", lambda fab, **_: steps.append(fab))
    monkeypatch.setattr(
        "flwr.clientapp.utils.get_load_client_app_fn", lambda *_: lambda *app: steps.append(app)
    )
    app = _flwr.App.read(tmp_path / "5")
    app.load()
    assert steps == [b"files", ("me/app", "1.2.3", "0123456789")]
    assert app.context == Context(0, 7, {"a": 1}, RecordDict(), {"lr": 0.5})

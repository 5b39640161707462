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
import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.supercore.fab import Fab
from flwr.supercore.run import Run

from flwr_hetero import cli
from flwr_hetero.fleet import _flwr, supernode
from flwr_hetero.fleet.forks import NVML

PULLED_BYTES = 1 << 24
SCRIPT = Path(__file__).with_name("warm_node.py")
COLD = {
    "threads": "it starts threads or processes when",
    "processes": "it starts threads or processes when",
    "hangs": "it uses pools of threads when",
    "gpu": "it uses the GPU when",
    "looks": "it looks for the GPU when",
    "raises": "ValueError: no such data",
    "exits": "SystemExit: not here",
}
SCENARIOS = ["several:plain", "several:plain,draw", "several:seeds,draw", "several:reads,read",
             "too_slow", "several:no-gpu", "crashes", "many_runs", "killed_parent", "leaves",
             "threads", "ended", "launcher", "handed_over", "weighed", "killed_first",
             "killed_loading", "ends_loading", "cold_in_turn",
             *(f"several:{app}" for app in COLD)]  # fmt: skip


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """Return what came of all scenarios, and what was printed."""
    folder = tmp_path_factory.mktemp("node")
    command = [sys.executable, SCRIPT, folder, *SCENARIOS]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # Another test in this process may have set it.
    environment.pop(NVML, None)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / "found.json").read_text())
    assert {name: each.get("code", 0) for name, each in result.items()} == dict.fromkeys(result, 0)
    assert {name: each["left"] for name, each in result.items()} == {name: [] for name in result}
    return result, done.stdout, done.stderr


def result_of(node, name):
    return node[0][name]["result"]


def values_of(node, name, key="found"):
    return [message[key] for message in result_of(node, name)]


def test_app_is_imported_once_and_its_parent_has_all_messages(node):
    assert values_of(node, "several:plain", "warm") == [True] * 4
    assert len(set(values_of(node, "several:plain", "parent"))) == 1
    assert len(set(values_of(node, "several:plain", "pid"))) == 4
    assert not any(values_of(node, "several:plain", "first"))
    assert node[0]["several:plain"]["imports"] == ["plain"]
    # a message sees nothing of the one before
    result = values_of(node, "several:plain")
    assert result == [[0, None, result[0][2], False]] * 4


def test_messages_while_the_app_is_imported(node):
    result = result_of(node, "handed_over")
    first, second = result["replies"]
    # the first hands over what it has pulled
    assert first["given"] == result["first"]
    assert first["parent"] == second["parent"] == result["parent"]
    assert result["away"]
    # the second pulls after that, or it would have the state that the first began with
    assert (second["warm"], second["given"]) == (True, None)
    assert len(result["pulled"]) == 2
    assert result["pulled"][1] == str(result["other"]["given"])
    # the other run's message did not wait, and no parent keeps what was pulled
    assert result["other"]["warm"]
    assert result["more"] < PULLED_BYTES // 2
    heavy, light = result_of(node, "weighed")
    assert heavy - light < PULLED_BYTES // 2


def test_what_is_killed_while_the_app_is_imported_costs_itself(node):
    next_message = result_of(node, "killed_first")
    assert next_message["warm"]
    assert next_message["parent"] == next_message["loaded"]
    assert node[0]["killed_first"]["imports"] == ["gated"]
    # without the app's parent, and without the first one, a message goes on by itself
    first, second = result_of(node, "killed_loading")
    assert first["pid"] == first["waited"]
    assert [first["warm"], second["warm"]] == [False, False]
    ended = result_of(node, "ends_loading")
    assert (ended["code"], ended["gone"]) == (0, True)
    assert ended["reply"]["pid"] == ended["reply"]["waited"]


def test_messages_of_a_cold_app_are_answered_in_turn(node):
    first, second = result_of(node, "cold_in_turn")
    assert [first["warm"], second["warm"]] == [False, False]
    assert first["found"] == [str(first["pid"])]
    assert second["found"] == [str(first["pid"]), str(second["pid"])]


def test_random_numbers_are_those_of_new_processes(node):
    drawn = values_of(node, "several:plain,draw")
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 4
    # an app that sets the generators when it is imported begins each message with them
    assert len(set(map(tuple, values_of(node, "several:seeds,draw")))) == 1


def test_preloaded_data_are_read_by_the_parent_once(node):
    result = result_of(node, "several:reads,read")
    assert [message["found"] for message in result] == [[result[0]["parent"]]] * 4


def test_message_that_crashes_wakes_the_launcher_and_costs_itself(node):
    _, before, *after, more = result_of(node, "crashes")
    assert not more
    assert [message["wakes"] for message in after] == [1, 1, 1]
    assert {message["parent"] for message in after} == {before["parent"]}
    assert node[0]["crashes"]["imports"] == ["plain"]


def test_oldest_of_too_many_runs_is_forgotten(node):
    result = result_of(node, "many_runs")
    assert result["away"]
    assert result["alive"] == [False, True, True]
    assert [message["warm"] for message in result["again"]] == [True, True]
    assert result["again"][0]["given"]


def test_parents_that_are_killed_or_slow(node):
    assert values_of(node, "killed_parent", "warm") == [True] * 4
    assert len(set(values_of(node, "killed_parent", "parent"))) == 2
    assert not result_of(node, "too_slow")["warm"]
    # the launcher goes on cold without its first parent
    assert result_of(node, "launcher") == {"woken": True, "slept": True, "refused": True}
    assert node[2].count("the first parent has ended") == 1


def test_processes_threads_and_exit_functions_of_an_app_or_a_message(node):
    assert values_of(node, "leaves", "warm") == [True, True]
    assert result_of(node, "threads")[1]
    ended = result_of(node, "ended")
    assert ended["gone"]
    for message in ended["found"]:
        # its own folder, and the parent's, which the first message has not removed
        assert len(message["found"]) == 2


@pytest.mark.parametrize("app", COLD)
def test_app_that_cannot_be_forked_has_processes_of_its_own(node, app):
    assert values_of(node, f"several:{app}", "warm") == [False] * 4
    assert all(values_of(node, f"several:{app}", "first"))
    (said,) = re.findall(rf"^{app} is not warm, .*", node[2], re.MULTILINE)
    assert COLD[app] in said


def test_where_there_is_no_gpu_looking_for_one_does_no_harm(node):
    assert values_of(node, "several:no-gpu", "warm") == [True] * 4


def test_text_is_written_once(node):
    imports = sum(each["imports"].count("plain") for each in node[0].values())
    assert node[1].count("imported") == imports


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


def pull_task_input(client: object) -> tuple[Message, Context, Run]:
    """Return what a version of Flower without apps in files might."""


@pytest.mark.parametrize(
    ("name", "replaced", "why"),
    [
        ("supernode.start_client_internal._push_messages", lambda state: None, "has no 'send:'"),
        ("supercore.superexec.run_superexec.AutoExecPlugin", None, "has no flwr.supercore.superex"),
        ("supernode.runtime.run_clientapp.run_clientapp", lambda: None, "has no 'token:'"),
        ("supernode.runtime.run_clientapp.pull_task_input", pull_task_input, "has no '.Run,'"),
    ],
)
def test_another_flwr_makes_a_node_cold(name, replaced, why, monkeypatch):
    assert supernode.why_cold([]) == ""
    monkeypatch.setattr(f"flwr.{name}", replaced)
    assert why in supernode.why_cold([])
    assert f"flwr {flwr.__version__}" in supernode.why_cold([])


def test_what_a_process_has_pulled_is_answered_by_another(monkeypatch):
    process = import_module("flwr.supernode.runtime.run_clientapp")
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(process.TaskIdentity, name, 1)
    context = Context(5, 7, {"name": "a"}, RecordDict({"n": MetricRecord({"n": 2})}), {"lr": 0.5})
    arrays = ArrayRecord([np.arange(6.0)])
    message = Message(RecordDict({"arrays": arrays}), 7, "train")
    fab = Fab("hash", b"files", {})
    run = Run.create_empty(5)
    run.fab_id = "me/app"
    run.fab_version = "1.2.3"
    spec = SimpleNamespace(runtime_api_address="", token="", insecure=True, parent_pid=None)
    spec.root_certificates_path = None
    steps = []
    answered = []

    def pull(client):
        steps.append("pull")
        process.TaskIdentity.task_id = 3
        process.TaskIdentity.run_id = 5
        process.TaskIdentity.node_id = 7
        return message, context, run, fab

    def answer(**_):
        result = process.pull_task_input("client")
        process.install_from_fab(result[3].content, skip_prompt=True)
        answered.append(result)

    def await_order(app=None, give=None):
        steps.append(app and (app, give()))

    def answer_with(**options):
        monkeypatch.setattr(process, "pull_task_input", pull)
        monkeypatch.setattr(process, "push_task_output", lambda: None)
        monkeypatch.setattr(process, "install_from_fab", lambda fab, **_: steps.append(fab))
        monkeypatch.setattr(process, "run_clientapp", answer)
        monkeypatch.setattr(sys, "argv", ["pytest"])
        monkeypatch.setattr(_flwr, "PROCESS", "pytest")
        _flwr.answer_message(spec, list, await_order, **options)

    answer_with()
    *before, (app, handed_over) = steps
    assert before == [None, "pull", b"files"]
    assert app == (
        ("me/app", "1.2.3", "hash"),
        Context(0, 7, {"name": "a"}, RecordDict(), {"lr": 0.5}),
    )
    steps.clear()
    process.TaskIdentity.task_id = 1
    answer_with(handed_over=handed_over)
    assert steps == []
    assert process.TaskIdentity.task_id == 3
    first, second = answered
    assert second[0].metadata == first[0].metadata
    np.testing.assert_array_equal(*(each[0].content["arrays"]["0"].numpy() for each in answered))
    assert second[1:3] == [context, run]
    assert second[3] == Fab("hash", b"", {})
    # a message that was not pulled before, of an app that is loaded
    answer_with(handed_over=b"")
    assert steps == ["pull"]


def test_command_passes_options_on(monkeypatch):
    calls = []
    options = ["--superlink", "a:1", "--node-config", "b=1 c='d'", "--help"]
    monkeypatch.setattr(supernode, "main", calls.append)
    assert cli.main(["supernode", *options]) == 0
    assert calls == [options]


def test_launcher_that_has_ended_is_started_again(monkeypatch, caplog):
    monkeypatch.setattr(supernode, "RESTART_S", 0.0)
    monkeypatch.setattr(sys, "executable", "/bin/true")
    node = supernode.WarmNode()
    node.start(["flower-superexec"])
    for _ in range(200):
        if "started again" in caplog.text:
            break
        node.sleep(0.01)
    assert "the launcher has ended and is started again" in caplog.text
    assert node.launchers[0].returncode is None  # its id is taken until the node ends
    assert [process.wait() for process in node.launchers] == [0, 0]


@pytest.mark.parametrize("has_replied", [False, True])
def test_node_whose_launchers_end_at_once_is_cold(has_replied, monkeypatch, caplog):
    monkeypatch.setattr(supernode, "RESTART_S", 0.0)
    monkeypatch.setattr(sys, "executable", "/bin/true")
    node = supernode.WarmNode()
    node.has_replied = has_replied
    node.start(["/bin/echo", "superexec"])
    while len(node.launchers) < 4 and not node.is_cold:
        node.sleep(0.01)
    node.sleep(0.01)
    commands = [process.args[0] for process in node.launchers if not process.wait()]
    assert commands[:3] == ["/bin/true", "/bin/true", "/bin/true" if has_replied else "/bin/echo"]
    assert caplog.text.count("cold from now on") == (not has_replied)

"""Processes of a warm node, without Flower: ``warm_node.py`` says what apps and messages do."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flwr_hetero import cli
from flwr_hetero.fleet import _flwr, supernode

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
             "several:slow", "several:no-gpu", "crashes", "many_runs", "killed_parent", "leaves",
             "threads", "ended", "launcher", *(f"several:{app}" for app in COLD)]  # fmt: skip


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """Return what came of all scenarios, and what was printed."""
    folder = tmp_path_factory.mktemp("node")
    command = [sys.executable, SCRIPT, folder, *SCENARIOS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "found.json").read_text())
    assert all(each.get("code", 0) == 0 for each in found.values())
    assert all(each["left"] == [] for each in found.values())
    return found, done.stdout, done.stderr


def came(node, name):
    return node[0][name]["came"]


def told(node, name, key="found"):
    return [message[key] for message in came(node, name)]


def test_first_message_is_cold_and_the_others_have_the_apps_parent(node):
    assert told(node, "several:plain", "warm") == [False, True, True, True]
    first, *others = told(node, "several:plain", "parent")
    assert len(set(others)) == 1
    assert others[0] != first
    assert len(set(told(node, "several:plain", "pid"))) == 4
    assert node[0]["several:plain"]["imports"] == ["plain"] * 2


def test_nothing_of_a_message_is_seen_by_the_next(node):
    found = told(node, "several:plain")
    assert found == [[0, None, found[0][2], False]] * 4


def test_random_numbers_are_those_of_new_processes(node):
    drawn = told(node, "several:plain,draw")
    for each in zip(*drawn, strict=True):
        assert len(set(each)) == 4
    # an app that sets the generators when it is imported begins each message with them
    assert len(set(map(tuple, told(node, "several:seeds,draw")))) == 1


def test_preloaded_data_are_read_by_the_parent_once(node):
    first, *others = came(node, "several:reads,read")
    assert first["found"] == [first["pid"]]
    assert [message["found"] for message in others] == [[others[0]["parent"]]] * 3


def test_message_that_crashes_is_told_and_costs_itself(node):
    _, before, *after = came(node, "crashes")
    assert [message["told"] for message in after] == [1, 1, 1]
    assert {message["parent"] for message in after} == {before["parent"]}
    assert node[0]["crashes"]["imports"] == ["plain"] * 2


def test_oldest_of_too_many_runs_is_forgotten(node):
    found = came(node, "many_runs")
    assert found["away"]
    assert found["alive"] == [False, True, True]
    assert [message["warm"] for message in found["again"]] == [False, True]


def test_killed_parent_is_started_again(node):
    assert told(node, "killed_parent", "warm") == [False, True, False, True]


def test_message_waits_for_a_parent_that_loads_but_not_for_ever(node):
    assert told(node, "several:slow", "warm")[:2] == [False, False]
    assert told(node, "killed_parent", "warm")[1]  # sent before the parent was there


def test_message_that_waits_is_kept_from_being_given_up(node):
    found = node[0]["several:slow"]["kept"]
    # one for the message that waited, and it has ended
    assert found == [True]


def test_processes_that_an_app_leaves_hold_nothing_up(node):
    assert told(node, "leaves", "warm") == [False, True]


def test_threads_of_a_message_end_with_it(node):
    assert came(node, "threads")[1]


def test_exit_functions_are_done_once_and_at_the_end(node):
    found = came(node, "ended")
    assert found["gone"]
    _, second = found["found"]
    assert len(second["found"]) == 2  # the parent's folder, which the first has not removed


@pytest.mark.parametrize("app", COLD)
def test_app_that_cannot_be_forked_has_processes_of_its_own(node, app):
    assert told(node, f"several:{app}", "warm") == [False] * 4
    assert all(told(node, f"several:{app}", "first"))
    (said,) = re.findall(rf"^{app} is not warm, .*", node[2], re.MULTILINE)
    assert COLD[app] in said


def test_where_there_is_no_gpu_looking_for_one_does_no_harm(node):
    assert told(node, "several:no-gpu", "warm") == [False, True, True, True]


def test_launcher_goes_on_cold_without_its_first_parent(node):
    assert came(node, "launcher") == {"woken": True, "slept": True, "refused": True}
    assert node[2].count("the first parent has ended") == 1


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
    found = supernode.why_cold(options)
    assert why in found
    assert bool(found) == bool(why)


def test_another_flwr_makes_a_node_cold_but_a_patch_does_not(monkeypatch):
    for version, why in (("1.41.9", ""), ("1.42.0", "flwr is 1.42.0, ")):
        monkeypatch.setattr(_flwr, "version", lambda name, version=version: version)
        assert supernode.why_cold([]).startswith(why)
        assert bool(supernode.why_cold([])) == bool(why)


def test_command_passes_options_on(monkeypatch):
    given, options = [], ["--superlink", "a:1", "--node-config", "b=1 c='d'", "--help"]
    monkeypatch.setattr(supernode, "main", given.append)
    assert cli.main(["supernode", *options]) == 0
    assert given == [options]


def test_launcher_that_has_ended_is_started_again(monkeypatch, caplog):
    places, started, popen = [], [], subprocess.Popen

    def run(*command, **settings):
        started.append(popen(*command, **settings))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", run)
    monkeypatch.setattr(_flwr, "replace_in_node", lambda *found: places.extend(found))
    monkeypatch.setattr(supernode, "pull_quickly", lambda: None)
    monkeypatch.setattr(supernode, "AGAIN_S", 0.0)
    monkeypatch.setattr(sys, "executable", "/bin/true")
    supernode.keep_warm()
    sleep, _, start = places
    start(["flower-superexec"])
    for _ in range(200):
        if "started again" in caplog.text:
            break
        sleep(0.01)
    assert "the launcher has ended: it is started again" in caplog.text
    assert started[0].returncode is None  # its id is taken until the node ends
    assert [process.wait() for process in started] == [0, 0]

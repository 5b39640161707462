"""A warm node without Flower: apps and messages are functions below, and report what they find.

``warm_node.py FOLDER`` runs all scenarios, and writes which of them fail to FOLDER/found.json.
"""

import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from flwr_hetero.client.preload import preload
from flwr_hetero.fleet import _flwr, forks, warm
from flwr_hetero.fleet.throttle import children

# A search for examples imports this file without an argument.
FOLDER = Path(*sys.argv[1:2])
SEEN = []
CALLS = []
TEMPORARY = []


def note(file, text):
    """Add a line to a file about what a process did that may be killed."""
    with (FOLDER / file).open("a") as out:
        out.write(f"{text}\n")


def noted(file):
    path = FOLDER / file
    return path.read_text().split() if path.exists() else []


def wait_for_gate():
    note("loading.txt", os.getpid())
    while not (FOLDER / "gate").exists():
        time.sleep(0.01)


def raises():
    raise ValueError("no such data")


class Ones(np.ndarray):
    """Stand in for a tensor."""

    def view(self, *shape):
        return self.reshape(shape)


def gpu(**cuda):
    """Import a stand-in for torch, with other functions of ``torch.cuda``."""
    names = {"is_initialized": bool, "_is_in_bad_fork": bool, "device_count": lambda: 1} | cuda
    sys.modules["torch"] = SimpleNamespace(
        cuda=SimpleNamespace(**names),
        get_num_threads=lambda: 1,
        set_num_threads=lambda count: None,
        zeros=lambda count, requires_grad: np.zeros(count),
        optim=SimpleNamespace(SGD=lambda parameters: None),
        ones=lambda count: np.ones(count).view(Ones),
    )


def hangs():
    forks.compute = lambda torch: time.sleep(60)


def sleeps(kind):
    kind(target=time.sleep, args=(60,), daemon=True).start()


APPS = {
    "plain": lambda: (print("imported"), note("plain.log", os.getpid())),
    "seeds": lambda: (random.seed(3), np.random.seed(3)),  # noqa: NPY002
    "gated": wait_for_gate,
    "temporary": lambda: TEMPORARY.append(tempfile.TemporaryDirectory(dir=FOLDER)),
    "reads": lambda: preload(lambda context: CALLS.append(os.getpid())),
    "threads": lambda: sleeps(threading.Thread),
    "processes": lambda: sleeps(multiprocessing.Process),
    "raises": raises,
    "exits": lambda: sys.exit("not here"),
    "hangs": hangs,
    "gpu": lambda: gpu(is_initialized=lambda: True),
    "looks": lambda: gpu(_is_in_bad_fork=lambda: True),
    "no-gpu": lambda: gpu(_is_in_bad_fork=lambda: True, device_count=lambda: 0),
}


def change():
    """Change what a process has; return what was there."""
    found = [len(SEEN), os.environ.get("SEEN"), os.getcwd(), forks.NVML in os.environ]
    SEEN.append(1)
    os.environ["SEEN"] = "1"
    os.chdir("/")
    return found


def draw():
    return [random.random(), np.random.random()]  # noqa: NPY002


def leave():
    """Leave a process that goes on, as a worker that reads data may."""
    pid = os.fork()
    if not pid:
        time.sleep(60)
        os._exit(0)
    return pid


def threaded():
    threading.Thread(target=lambda: (time.sleep(0.1), (FOLDER / "late").touch())).start()


def own_folder():
    TEMPORARY.append(tempfile.TemporaryDirectory(dir=FOLDER))
    return [each.name for each in TEMPORARY if Path(each.name).exists()]


def out_of_memory():
    raise MemoryError


BODIES = {
    "change": change,
    "draw": draw,
    "leave": leave,
    "threaded": threaded,
    "own_folder": own_folder,
    "read": lambda: CALLS,
    "slow": lambda: time.sleep(0.3),
    "memory": out_of_memory,
    "exit": lambda: os._exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
EMPTY = Context(1, 1, {}, RecordDict(), {})


class StoredApp(_flwr.App):
    """An app whose import calls a function of APPS."""

    @classmethod
    def read(cls, file):
        return cls(*file.read_text().split(), b"", EMPTY)

    def load(self):
        note("imports.txt", self.fab_id)
        APPS[self.fab_id]()


def answer(spec, on_end, *, is_loaded):
    app, body, results = spec
    report = {"parent": os.getppid(), "pid": os.getpid(), "warm": is_loaded, "found": None}
    report["at"] = time.monotonic()
    with suppress(ValueError, SystemExit):
        if not is_loaded:
            APPS[app]()
        report["found"] = BODIES[body]()
    os.write(results, json.dumps(report | {"end": time.monotonic()}).encode())
    on_end()
    sys.exit(0)


class Node:
    """A first parent and its pipes."""

    def __init__(self):
        self.done, done = os.pipe()
        self.results, self.answers = os.pipe()
        self.tasks, tasks = Pipe()

        def serve():
            warm.FirstParent(tasks, done, FOLDER).serve()

        self.first = forks.start_process(serve, [self.tasks])
        tasks.close()

    def prepare(self, app, run=1):
        """Have an app loaded for a run."""
        (FOLDER / f"{run}").write_text(f"{app} 1.0.0 hash")
        self.tasks.send((run, None))

    def ask(self, app, body="change", run=1):
        self.prepare(app, run)
        self.tasks.recv()
        self.tasks.send((run, (app, body, self.answers)))

    def reply(self):
        result = json.loads(os.read(self.results, 65536))
        return result | {"first": result["parent"] == self.first}

    def messages(self, count, app, body="change", run=1):
        replies = []
        for _ in range(count):
            self.ask(app, body, run)
            replies.append(self.reply())
        return replies

    def code(self):
        """Wait for the end of the first parent; return its exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.first, 0)[1])


def is_there(pid):
    """Return whether a process runs: not one that has ended and waits to be collected."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def comes(condition):
    """Wait until a condition holds; return whether it does."""
    for _ in range(6000):
        if condition():
            return True
        time.sleep(0.01)
    return False


def gone(*pids):
    return comes(lambda: not any(map(is_there, pids)))


def check_all_warm(replies):
    assert all(reply["warm"] for reply in replies), replies
    assert not any(reply["first"] for reply in replies), replies


# --- scenarios ---------------------------------------------------------------------------------


def app_is_imported_once(node):
    replies = node.messages(4, "plain")
    check_all_warm(replies)
    assert len({reply["parent"] for reply in replies}) == 1
    assert len({reply["pid"] for reply in replies}) == 4
    assert noted("imports.txt") == ["plain"]
    # A message sees nothing of the one before.
    assert [reply["found"] for reply in replies] == [[0, None, os.getcwd(), False]] * 4


def random_numbers_are_those_of_new_processes(node):
    drawn = [reply["found"] for reply in node.messages(4, "plain", "draw")]
    assert all(len(set(numbers)) == 4 for numbers in zip(*drawn, strict=True))


def app_that_sets_generators_begins_each_message_with_them(node):
    drawn = [reply["found"] for reply in node.messages(4, "seeds", "draw")]
    assert len({tuple(numbers) for numbers in drawn}) == 1


def preloaded_data_are_read_once(node):
    replies = node.messages(4, "reads", "read")
    assert [reply["found"] for reply in replies] == [[replies[0]["parent"]]] * 4


def looking_for_a_gpu_where_there_is_none_does_no_harm(node):
    check_all_warm(node.messages(2, "no-gpu"))


def message_begins_when_the_last_one_has_ended(node):
    node.ask("plain", "slow")
    node.ask("plain", "slow")
    assert node.reply()["end"] <= node.reply()["at"]


def message_that_crashes_costs_itself(node):
    replies = node.messages(1, "plain")
    for body in ("exit", "kill", "memory"):
        node.ask("plain", body)
        replies += node.messages(1, "plain")
    check_all_warm(replies)
    assert noted("imports.txt") == ["plain"]


def oldest_of_too_many_runs_is_forgotten(node):
    parents = [node.messages(1, "plain", run=run)[0]["parent"] for run in range(3)]
    assert gone(parents[0])
    assert all(map(is_there, parents[1:]))
    check_all_warm(node.messages(1, "plain", run=0))


def apps_parent_is_killed(node):
    replies = node.messages(2, "plain")
    os.kill(replies[1]["parent"], signal.SIGKILL)
    assert gone(replies[1]["parent"])
    replies += node.messages(2, "plain")
    check_all_warm(replies)
    assert len({reply["parent"] for reply in replies}) == 2


def apps_parent_is_killed_before_a_message_begins(node):
    [reply] = node.messages(1, "plain")
    node.prepare("plain")
    node.tasks.recv()
    os.kill(reply["parent"], signal.SIGKILL)
    assert gone(reply["parent"])
    node.tasks.send((1, ("plain", "change", node.answers)))
    assert not node.reply()["warm"]


def apps_parent_is_killed_while_it_loads(node):
    os.kill(begin_loading(node), signal.SIGKILL)
    node.tasks.recv()
    (FOLDER / "gate").touch()
    assert [reply["warm"] for reply in node.messages(2, "gated")] == [False, False]


def launcher_ends_while_an_app_is_loaded(node):
    parent = begin_loading(node)
    node.tasks.close()
    (FOLDER / "gate").touch()
    assert node.code() == 0
    assert gone(parent)


def message_of_a_run_whose_app_was_not_saved_is_cold(node):
    node.tasks.send((1, None))
    node.tasks.recv()
    node.tasks.send((1, ("plain", "change", node.answers)))
    assert not node.reply()["warm"]


def message_leaves_a_process(node):
    replies = node.messages(2, "plain", "leave")
    for reply in replies:
        os.kill(reply["found"], signal.SIGKILL)
    check_all_warm(replies)


def message_ends_with_its_threads(node):
    [reply] = node.messages(1, "plain", "threaded")
    assert gone(reply["pid"])
    assert (FOLDER / "late").exists()


def nothing_is_left_of_a_node_that_has_ended(node):
    replies = node.messages(2, "temporary", "own_folder")
    node.tasks.close()
    assert node.code() == 0
    assert gone(*(reply[key] for reply in replies for key in ("parent", "pid")))
    # One is the message's own, and one the parent's, which no message removes.
    assert [len(reply["found"]) for reply in replies] == [2, 2]


def launcher_goes_on_without_its_first_parent(_):
    runs, on_message = os.pipe()
    _, done = os.pipe()
    before = set(children(os.getpid()))

    def superexec(launch, sleep, close):
        (first,) = set(children(os.getpid())) - before
        (FOLDER / "5").write_text("plain 1.0.0 hash")
        os.write(on_message, b"5\n5\n")
        sleep(60.0)
        assert noted("imports.txt") == ["plain"]
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        for _ in range(2):
            os.write(on_message, b"5\n")
            sleep(60.0)
        with pytest.raises(OSError, match="closed"):
            launch(5, ("plain", "change", 0))
        close()

    os.environ[warm.PIPES] = f"{runs} {done} {FOLDER}"
    _flwr.run_superexec = superexec
    warm.main()


def begin_loading(node):
    """Have an app imported that waits; return the process."""
    node.prepare("gated")
    comes(lambda: noted("loading.txt"))
    return int(noted("loading.txt")[0])


def cold(app):
    """Make a scenario of an app that cannot be forked."""

    def scenario(node):
        replies = node.messages(2, app)
        assert [reply["warm"] for reply in replies] == [False] * 2
        assert all(reply["first"] for reply in replies)

    return scenario


COLD = {
    "threads": "it starts threads or processes when",
    "processes": "it starts threads or processes when",
    "hangs": "it uses pools of threads when",
    "gpu": "it uses the GPU when",
    "looks": "it looks for the GPU when",
    "raises": "ValueError: no such data",
    "exits": "SystemExit: not here",
}
"""Apps that cannot be forked, and what the log says of them."""
PLAIN = [
    app_is_imported_once,
    random_numbers_are_those_of_new_processes,
    app_that_sets_generators_begins_each_message_with_them,
    preloaded_data_are_read_once,
    looking_for_a_gpu_where_there_is_none_does_no_harm,
    message_begins_when_the_last_one_has_ended,
    message_that_crashes_costs_itself,
    oldest_of_too_many_runs_is_forgotten,
    apps_parent_is_killed,
    apps_parent_is_killed_before_a_message_begins,
    apps_parent_is_killed_while_it_loads,
    launcher_ends_while_an_app_is_loaded,
    message_of_a_run_whose_app_was_not_saved_is_cold,
    message_leaves_a_process,
    message_ends_with_its_threads,
    nothing_is_left_of_a_node_that_has_ended,
    launcher_goes_on_without_its_first_parent,
]
SCENARIOS = {scenario.__name__: scenario for scenario in PLAIN}
SCENARIOS |= {f"cold: {app}": cold(app) for app in COLD}


def run(name):
    """Run a scenario; return what failed."""
    forks.PROBE_S = 0.3 if name == "cold: hangs" else 60.0
    for file in [*FOLDER.glob("*.txt"), *FOLDER.glob("gate"), *FOLDER.glob("[0-9]")]:
        file.unlink()
    node = Node()
    try:
        SCENARIOS[name](node)
        if not node.tasks.closed:
            node.tasks.close()
            assert node.code() == 0
        assert not list(FOLDER.glob("tmp*"))
    except Exception:
        return traceback.format_exc()
    return ""


def main():
    logging.getLogger("flwr").handlers[:] = [logging.StreamHandler()]
    logging.getLogger("flwr").propagate = False
    _flwr.App = StoredApp
    _flwr.answer_message = answer
    found = {}
    for name in SCENARIOS:
        print(f"--- {name}", file=sys.stderr, flush=True)
        found[name] = run(name)
    (FOLDER / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

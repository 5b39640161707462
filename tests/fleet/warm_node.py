"""A warm node without Flower: apps and messages are functions below, and note what they find.

``warm_node.py FOLDER SCENARIO ...`` writes what each scenario returns to FOLDER/found.json.
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
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from flwr.app import Context, RecordDict

from flwr_hetero.client.preload import preload
from flwr_hetero.fleet import _flwr, forks, warm
from flwr_hetero_studies.real.throttle import children

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
    "plain": lambda: print("imported"),
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
    def load(cls, file):
        app = cls(*file.read_text().split(), b"", EMPTY)
        note("imports.txt", app.fab_id)
        APPS[app.fab_id]()
        return app


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

    def end(self):
        self.tasks.close()
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


def several(node, app, body="change"):
    return node.messages(4, app, body)


def in_turn(node):
    """Send two messages at once."""
    node.ask("plain", "slow")
    node.ask("plain", "slow")
    return [node.reply(), node.reply()]


def crashes(node):
    result = node.messages(1, "plain")
    for body in ("exit", "kill", "memory"):
        node.ask("plain", body)
        result += node.messages(1, "plain")
    return result


def many_runs(node):
    result = [node.messages(1, "plain", run=run)[0] for run in range(3)]
    parents = [each["parent"] for each in result]
    away = gone(parents[0])
    alive = [is_there(pid) for pid in parents]
    return {"away": away, "alive": alive, "again": node.messages(1, "plain", run=0)}


def killed_parent(node):
    result = node.messages(2, "plain")
    os.kill(result[1]["parent"], signal.SIGKILL)
    gone(result[1]["parent"])
    return [*result, *node.messages(2, "plain")]


def begin_loading(node):
    """Have an app imported that waits; return the process."""
    node.prepare("gated")
    comes(lambda: noted("loading.txt"))
    return int(noted("loading.txt")[0])


def killed_loading(node):
    os.kill(begin_loading(node), signal.SIGKILL)
    node.tasks.recv()
    (FOLDER / "gate").touch()
    return node.messages(2, "gated")


def ends_loading(node):
    """Let the launcher end while an app is imported."""
    parent = begin_loading(node)
    node.tasks.close()
    (FOLDER / "gate").touch()
    return {"code": os.waitstatus_to_exitcode(os.waitpid(node.first, 0)[1]), "gone": gone(parent)}


def without_app(node):
    """Send a message of a run that was never prepared."""
    node.tasks.send((1, ("plain", "change", node.answers)))
    return [node.reply()]


def leaves(node):
    result = node.messages(2, "plain", "leave")
    for each in result:
        os.kill(each["found"], signal.SIGKILL)
    return result


def threads(node):
    [result] = node.messages(1, "plain", "threaded")
    gone(result["pid"])
    return (FOLDER / "late").exists()


def ended(node):
    """Tell what is left of a node whose launcher has gone."""
    result = node.messages(2, "temporary", "own_folder")
    code = node.end()
    pids = [each[key] for each in result for key in ("parent", "pid")]
    return {"code": code, "gone": gone(*pids), "found": result}


def launcher(_):
    """Kill the first parent of a launcher, as the system may; tell how it goes on."""
    runs, on_message = os.pipe()
    _, done = os.pipe()
    result = {}

    def superexec(launch, sleep, close):
        (first,) = set(children(os.getpid())) - before
        (FOLDER / "5").write_text("plain 1.0.0 hash")
        os.write(on_message, b"5\n5\n")
        sleep(60.0)
        result["imports"] = noted("imports.txt")
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        os.write(on_message, b"5\n")
        sleep(60.0)
        try:
            launch(5, ("plain", "change", 0))
        except OSError:
            result["refused"] = True
        os.write(on_message, b"5\n")
        sleep(60.0)
        close()

    before = set(children(os.getpid()))
    os.environ[warm.PIPES] = f"{runs} {done} {FOLDER}"
    _flwr.import_process = lambda: None
    _flwr.run_superexec = superexec
    warm.main()
    return result


def main():
    logging.getLogger("flwr").handlers[:] = [logging.StreamHandler()]
    logging.getLogger("flwr").propagate = False
    _flwr.App = StoredApp
    _flwr.answer_message = answer
    result = {}
    for name in sys.argv[2:]:
        scenario, _, argument = name.partition(":")
        forks.PROBE_S = 0.3 if name == "several:hangs" else 60.0
        for file in [*FOLDER.glob("*.txt"), *FOLDER.glob("gate")]:
            file.unlink()
        node = Node()
        print(f"--- {name}", file=sys.stderr, flush=True)
        words = argument.split(",") if argument else []
        result[name] = {"result": globals()[scenario](node, *words)}
        if not node.tasks.closed:
            result[name]["code"] = node.end()
        result[name]["imports"] = noted("imports.txt")
        result[name]["left"] = [str(path) for path in FOLDER.glob("tmp*")]
        sys.stdout.flush()
    (FOLDER / "found.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

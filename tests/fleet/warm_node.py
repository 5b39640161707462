"""A warm node without Flower: messages are functions below, and tell what they have found.

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
from flwr_hetero.fleet.forks import rest_of_process

# imported by a search for examples it has no argument
FOLDER = Path(*sys.argv[1:2])
SEEN, LOADS, CALLS, TEMPORARY = [], [], [], []


# --- apps: what is done when they are imported ------------------------------------------------
def import_app(name, *_):
    note("imports.txt", name)
    APPS[name]()


def note(file, text):
    """Add a line to a file: what a process did that may be killed."""
    with (FOLDER / file).open("a") as out:
        out.write(f"{text}\n")


def noted(file):
    path = FOLDER / file
    return path.read_text().split() if path.exists() else []


def await_notes(file, count):
    """Wait for lines in a file; return them."""
    for _ in range(1000):
        if len(found := noted(file)) >= count:
            return found
        time.sleep(0.01)
    raise TimeoutError(file)


def wait_for_gate():
    note("loading.txt", os.getpid())
    while not (FOLDER / "gate").exists():
        time.sleep(0.01)


def raises():
    raise ValueError("no such data")


class Ones(np.ndarray):
    """A tensor, for all that is done to one."""

    def view(self, *shape):
        return self.reshape(shape)


def gpu(**cuda):
    """Import a torch of which the rest is told; Flower's own import needs none."""

    def found():
        return False

    names = {"is_initialized": found, "_is_in_bad_fork": found, "device_count": lambda: 1} | cuda
    torch = SimpleNamespace(cuda=SimpleNamespace(**names), get_num_threads=lambda: 1)
    torch.set_num_threads = lambda count: None
    torch.zeros = lambda count, requires_grad: np.zeros(count)
    torch.optim = SimpleNamespace(SGD=lambda parameters: None)
    torch.ones = lambda count: np.ones(count).view(Ones)
    sys.modules["torch"] = torch


def hangs():
    forks.compute = lambda torch: time.sleep(60)


APPS = {
    "plain": lambda: print("imported"),
    "seeds": lambda: (random.seed(3), np.random.seed(3)),  # noqa: NPY002
    "slow": lambda: time.sleep(0.3),
    "gated": wait_for_gate,
    "gated-threads": lambda: (wait_for_gate(), APPS["threads"]()),
    "temporary": lambda: TEMPORARY.append(tempfile.TemporaryDirectory(dir=FOLDER)),
    "reads": lambda: LOADS.append(preload(lambda context: CALLS.append(os.getpid()))),
    "threads": lambda: threading.Thread(target=time.sleep, args=(60,), daemon=True).start(),
    "processes": lambda: multiprocessing.Process(target=time.sleep, args=(1,), daemon=True).start(),
    "raises": raises,
    "exits": lambda: sys.exit("not here"),
    "hangs": hangs,
    "gpu": lambda: gpu(is_initialized=lambda: True),
    "looks": lambda: gpu(_is_in_bad_fork=lambda: True),
    "no-gpu": lambda: gpu(_is_in_bad_fork=lambda: True, device_count=lambda: 0),
}


# --- messages: what they do, and tell ----------------------------------------------------------
def change():
    """Change what a process has; tell what was there."""
    found = [len(SEEN), os.environ.get("SEEN"), os.getcwd(), NVML in os.environ]
    SEEN.append(1)
    os.environ["SEEN"] = "1"
    os.chdir("/")
    return found


def draw():
    return [random.random(), np.random.random()]  # noqa: NPY002


def leave():
    """Leave a process that goes on, as a worker that reads data may."""
    if not (pid := os.fork()):
        time.sleep(60)
        os._exit(0)
    return pid


def threaded():
    thread = threading.Thread(target=lambda: (time.sleep(0.1), (FOLDER / "late").touch()))
    thread.start()


def look():
    """Tell which messages have pulled; a next one that does not wait has by then."""
    time.sleep(0.2)
    return noted("pulled.txt")


def own_folder():
    TEMPORARY.append(tempfile.TemporaryDirectory(dir=FOLDER))
    return [each.name for each in TEMPORARY if Path(each.name).exists()]


def out_of_memory():
    raise MemoryError


BODIES = {
    "change": change,
    "draw": draw,
    "leave": leave,
    "look": look,
    "threaded": threaded,
    "own_folder": own_folder,
    "read": lambda: [LOADS[0](Context(1, 1, {}, RecordDict(), {})) for _ in range(2)] and CALLS,
    "memory": out_of_memory,
    "exit": lambda: os._exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
NVML = forks.NVML
PULLED_BYTES = 1 << 26
"""Size of what a first message has pulled: no pipe takes as much."""


def answer(spec, on_end, await_order, given=None):
    app, body, results = spec
    if given is None:
        note("begun.txt", os.getpid())
        await_order()
        note("pulled.txt", os.getpid())
        pulled = f"{os.getpid()}".encode().ljust(PULLED_BYTES)
        await_order(_flwr.App((app, "1.0.0", "hash"), 1, {}, {}), lambda: pulled)
    told = {"parent": os.getppid(), "pid": os.getpid(), "warm": given is not None, "found": None}
    told["given"] = int(given) if given else None
    with suppress(ValueError, SystemExit):
        if given is None:
            import_app(app)
        told["found"] = BODIES[body]()
    os.write(results, json.dumps(told).encode())
    on_end()
    sys.exit(0)


class Node:
    """A first parent and its pipes."""

    def __init__(self):
        self.own, tasks = Pipe()
        (self.done, done), self.results = os.pipe(), os.pipe()
        if not (pid := os.fork()):
            with rest_of_process():
                self.own.close()
                warm.FirstParent(tasks, done).serve()
        tasks.close()
        self.first = pid

    def ask(self, app, body="change", run=1):
        self.own.send((run, (app, body, self.results[1])))

    def message(self, app, body="change", run=1):
        self.ask(app, body, run)
        return self.reply()

    def reply(self):
        found = json.loads(os.read(self.results[0], 65536))
        return found | {"first": found["parent"] == self.first}

    def messages(self, count, app, body="change", run=1):
        return [self.message(app, body, run) for _ in range(count)]

    def wakes(self):
        """Wait until the launcher is told of something; tell of how much."""
        count = 0
        while self.own.poll(5 if not count else 0.05):
            self.own.recv()
            count += 1
        return count

    def end(self):
        self.own.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.first, 0)[1])


def is_there(pid):
    """Return whether a process runs: not one that has ended and waits to be collected."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def gone(pids):
    for _ in range(500):
        if not any(map(is_there, pids)):
            return True
        time.sleep(0.01)
    return False


# --- scenarios -----------------------------------------------------------------------------------
def several(node, app, body="change"):
    return node.messages(4, app, body)


def crashes(node):
    found = node.messages(2, "plain")
    for body in ("exit", "kill", "memory"):
        node.wakes()
        node.ask("plain", body)
        told = node.wakes()
        found.append(node.message("plain") | {"told": told})
    return found


def many_runs(node):
    found = [node.messages(2, "plain", run=run)[1] for run in range(3)]
    parents = [each["parent"] for each in found]
    away = gone(parents[:1])
    alive = [is_there(pid) for pid in parents]
    return {"away": away, "alive": alive, "again": node.messages(2, "plain", run=0)}


def killed_parent(node):
    found = node.messages(2, "plain")
    os.kill(found[1]["parent"], signal.SIGKILL)
    gone([found[1]["parent"]])
    return [*found, *node.messages(2, "plain")]


def loads(node, app="gated", body="change"):
    """Begin a run, and wait until its app is being imported; tell of the two processes."""
    (FOLDER / "gate").unlink(missing_ok=True)
    node.ask(app, body)
    return int(await_notes("pulled.txt", 1)[0]), int(await_notes("loading.txt", 1)[0])


def open_gate():
    (FOLDER / "gate").touch()


def memory_bytes(pid):
    """Return the memory that is in a process's own hands."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if "Private" in line) * 1024


def handed_over(node):
    """Send another run's message, and a second one of the run, while an app is imported."""
    first, parent = loads(node)
    before = memory_bytes(node.first)
    node.ask("gated")
    began = await_notes("begun.txt", 2)
    other = node.message("plain", run=2)
    open_gate()
    replies = [node.reply(), node.reply()]
    away = gone([first, int(began[1]), other["pid"], *(each["pid"] for each in replies)])
    memory = [memory_bytes(node.first) - before, *map(memory_bytes, (parent, other["parent"]))]
    return {"first": first, "parent": parent, "other": other, "replies": replies,
            "pulled": noted("pulled.txt"), "memory": memory, "away": away}  # fmt: skip


def killed_first(node):
    first, parent = loads(node)
    os.kill(first, signal.SIGKILL)
    gone([first])
    open_gate()
    return node.message("gated") | {"loaded": parent}


def killed_loading(node):
    first, parent = loads(node)
    os.kill(parent, signal.SIGKILL)
    gone([parent])
    open_gate()
    return [node.reply() | {"waited": first}, node.message("gated")]


def ends_loading(node):
    """Let the launcher end while an app is imported."""
    first, parent = loads(node)
    code = node.end()
    open_gate()
    return {"code": code, "reply": node.reply() | {"waited": first}, "gone": gone([parent])}


def cold_in_turn(node):
    """Send two messages to an app that turns out to be cold."""
    loads(node, "gated-threads", "look")
    node.ask("gated-threads", "look")
    await_notes("begun.txt", 2)
    open_gate()
    return [node.reply(), node.reply()]


def leaves(node):
    found = node.messages(2, "plain", "leave")
    for each in found:
        os.kill(each["found"], signal.SIGKILL)
    return found


def threads(node):
    found = node.message("plain", "threaded")
    gone([found["pid"]])
    return [found, (FOLDER / "late").exists()]


def ended(node):
    """Tell what is left of a node whose launcher has gone."""
    found = node.messages(2, "temporary", "own_folder")
    code = node.end()
    pids = [each[key] for each in found for key in ("parent", "pid")]
    return {"code": code, "gone": gone(pids), "found": found}


def launcher(_):
    """Kill the first parent of a launcher, as the system may; tell how it goes on."""
    (task, on_task), (_, reply) = os.pipe(), os.pipe()
    found = {}

    def superexec(launch, sleep, close):
        (first,) = set(children()) - before
        os.kill(first, signal.SIGKILL)
        begun = time.monotonic()
        sleep(5.0)
        found["woken"] = time.monotonic() - begun < 4
        begun = time.monotonic()
        sleep(0.2)
        found["slept"] = time.monotonic() - begun >= 0.2
        os.write(on_task, b".")
        sleep(60.0)
        try:
            launch(1, ("plain", "change", 0))
        except OSError:
            found["refused"] = True
        os.waitpid(first, 0)
        close()

    def children():
        return [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]

    before = set(children())
    os.environ[warm.PIPES] = f"{task} {reply}"
    _flwr.import_process, _flwr.run_superexec = (lambda: None), superexec
    warm.main()
    return found


def main():
    logging.getLogger("flwr").handlers[:] = [logging.StreamHandler()]
    logging.getLogger("flwr").propagate = False
    _flwr.load_app, _flwr.answer_message = import_app, answer
    found = {}
    for name in sys.argv[2:]:
        scenario, _, argument = name.partition(":")
        warm.LOAD_S, forks.PROBE_S = (0.1 if name == "several:slow" else 20.0), 0.3
        node = Node()
        for file in FOLDER.glob("*.txt"):
            file.unlink()
        print(f"--- {name}", file=sys.stderr, flush=True)
        words = argument.split(",") if argument else []
        found[name] = {"came": globals()[scenario](node, *words)}
        if not node.own.closed:
            found[name]["code"] = node.end()
        found[name]["imports"] = noted("imports.txt")
        found[name]["left"] = [str(path) for path in FOLDER.glob("tmp*")]
        sys.stdout.flush()
    (FOLDER / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

"""Apps and messages of ``fleet/warm_node.py``: what they do, and tell."""

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from flwr.app import Context, RecordDict

from flwr_hetero.client.preload import preload
from flwr_hetero.fleet import forks

# imported by a search for examples it has no argument
FOLDER = Path(*sys.argv[1:2])
SEEN = []
LOADS = []
CALLS = []
TEMPORARY = []


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
    for _ in range(6000):
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
    "slow": lambda: str(os.getpid()) in noted("pulled.txt") or wait_for_gate(),
    "gated": wait_for_gate,
    "gated-threads": lambda: (wait_for_gate(), APPS["threads"]()),
    "temporary": lambda: TEMPORARY.append(tempfile.TemporaryDirectory(dir=FOLDER)),
    "reads": lambda: LOADS.append(preload(lambda context: CALLS.append(os.getpid()))),
    "threads": lambda: threading.Thread(target=time.sleep, args=(60,), daemon=True).start(),
    "processes": lambda: multiprocessing.Process(
        target=time.sleep, args=(60,), daemon=True
    ).start(),
    "raises": raises,
    "exits": lambda: sys.exit("not here"),
    "hangs": hangs,
    "gpu": lambda: gpu(is_initialized=lambda: True),
    "looks": lambda: gpu(_is_in_bad_fork=lambda: True),
    "no-gpu": lambda: gpu(_is_in_bad_fork=lambda: True, device_count=lambda: 0),
}


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


def memory_bytes(pid):
    """Return a process's resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
    "weigh": lambda: memory_bytes(os.getppid()),
    "threaded": threaded,
    "own_folder": own_folder,
    "read": lambda: [LOADS[0](Context(1, 1, {}, RecordDict(), {})) for _ in range(2)] and CALLS,
    "memory": out_of_memory,
    "exit": lambda: os._exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
NVML = forks.NVML

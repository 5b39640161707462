"""A warm node without Flower: messages are functions below, and tell what they have found.

``warm_node.py FOLDER SCENARIO ...`` writes what each scenario returns to FOLDER/found.json.
"""

import json
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path

from warm_apps import (
    BODIES,
    FOLDER,
    await_notes,
    import_app,
    memory_bytes,
    note,
    noted,
)

from flwr_hetero.fleet import _flwr, forks, warm
from flwr_hetero.fleet.forks import rest_of_process

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

    def wakes(self, count):
        """Wait until the launcher was told of so many things; return how many there were."""
        found = 0
        while found < count and self.own.poll(60):
            self.own.recv()
            found += 1
        return found

    def end(self):
        self.own.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.first, 0)[1])


def is_there(pid):
    """Return whether a process runs: not one that has ended and waits to be collected."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def gone(pids):
    for _ in range(6000):
        if not any(map(is_there, pids)):
            return True
        time.sleep(0.01)
    return False


# --- scenarios -----------------------------------------------------------------------------------
def several(node, app, body="change"):
    return node.messages(4, app, body)


def crashes(node):
    found = node.messages(2, "plain")
    # the app's parent is warm, two messages have ended, and the one that was handed over
    node.wakes(4)
    for body in ("exit", "kill", "memory"):
        node.ask("plain", body)
        told = node.wakes(1)
        found.append(node.message("plain") | {"told": told})
        node.wakes(1)
    return [*found, node.own.poll(0.05)]


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
    more = memory_bytes(node.first) - before
    return {"first": first, "parent": parent, "other": other, "replies": replies,
            "pulled": noted("pulled.txt"), "more": more, "away": away}  # fmt: skip


def too_slow(node):
    (FOLDER / "gate").unlink(missing_ok=True)
    found = node.message("slow")
    open_gate()
    return found


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


def weighed(node):
    """Tell what the app's parent has while its messages are answered."""
    return [node.message("plain", "weigh")["found"] for _ in range(2)]


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
        warm.LOAD_S = 0.1 if name == "too_slow" else 600.0
        forks.PROBE_S = 0.3 if name == "several:hangs" else 60.0
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

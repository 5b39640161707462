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
from pathlib import Path

from flwr.app import Context, RecordDict
from warm_apps import BODIES, FOLDER, await_notes, import_app, memory_bytes, note, noted

from flwr_hetero.fleet import _flwr, forks, warm
from flwr_hetero.fleet.throttle import children

PULLED_BYTES = 1 << 24
"""Size of what a first message has pulled: no pipe takes as much."""


def answer(spec, on_end, await_order, handed_over=None):
    app, body, results = spec
    if handed_over is None:
        note("begun.txt", os.getpid())
        await_order()
        note("pulled.txt", os.getpid())
        pulled = f"{os.getpid()}".encode().ljust(PULLED_BYTES)
        context = Context(0, 1, {}, RecordDict(), {})
        await_order(_flwr.App((app, "1.0.0", "hash"), context), lambda: pulled)
    report = {"parent": os.getppid(), "pid": os.getpid(), "warm": handed_over is not None}
    report |= {"found": None, "given": int(handed_over) if handed_over else None}
    with suppress(ValueError, SystemExit):
        if handed_over is None:
            import_app(app)
        report["found"] = BODIES[body]()
    os.write(results, json.dumps(report).encode())
    on_end()
    sys.exit(0)


class Node:
    """A first parent and its pipes."""

    def __init__(self):
        self.done, done = os.pipe()
        self.results = os.pipe()

        def serve(connection):
            warm.FirstParent(connection, done).serve()

        self.first, self.tasks = forks.start_process(serve)

    def ask(self, app, body="change", run=1):
        self.tasks.send((run, (app, body, self.results[1])))

    def message(self, app, body="change", run=1):
        self.ask(app, body, run)
        return self.reply()

    def reply(self):
        result = json.loads(os.read(self.results[0], 65536))
        return result | {"first": result["parent"] == self.first}

    def messages(self, count, app, body="change", run=1):
        return [self.message(app, body, run) for _ in range(count)]

    def wakes(self, count):
        """Wait until the launcher was woken so many times; return how often it was."""
        num_wakes = 0
        while num_wakes < count and self.tasks.poll(60):
            self.tasks.recv()
            num_wakes += 1
        return num_wakes

    def end(self):
        self.tasks.close()
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


def several(node, app, body="change"):
    return node.messages(4, app, body)


def crashes(node):
    result = node.messages(2, "plain")
    # the app's parent is warm, two messages have ended, and the one that was handed over
    node.wakes(4)
    for body in ("exit", "kill", "memory"):
        node.ask("plain", body)
        num_wakes = node.wakes(1)
        result.append(node.message("plain") | {"wakes": num_wakes})
        node.wakes(1)
    return [*result, node.tasks.poll(0.05)]


def many_runs(node):
    result = [node.messages(2, "plain", run=run)[1] for run in range(3)]
    parents = [each["parent"] for each in result]
    away = gone(parents[:1])
    alive = [is_there(pid) for pid in parents]
    return {"away": away, "alive": alive, "again": node.messages(2, "plain", run=0)}


def killed_parent(node):
    result = node.messages(2, "plain")
    os.kill(result[1]["parent"], signal.SIGKILL)
    gone([result[1]["parent"]])
    return [*result, *node.messages(2, "plain")]


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
    result = node.message("slow")
    open_gate()
    return result


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
    result = node.messages(2, "plain", "leave")
    for each in result:
        os.kill(each["found"], signal.SIGKILL)
    return result


def threads(node):
    result = node.message("plain", "threaded")
    gone([result["pid"]])
    return [result, (FOLDER / "late").exists()]


def ended(node):
    """Tell what is left of a node whose launcher has gone."""
    result = node.messages(2, "temporary", "own_folder")
    code = node.end()
    pids = [each[key] for each in result for key in ("parent", "pid")]
    return {"code": code, "gone": gone(pids), "found": result}


def launcher(_):
    """Kill the first parent of a launcher, as the system may; tell how it goes on."""
    task, on_task = os.pipe()
    _, reply = os.pipe()
    result = {}

    def superexec(launch, sleep, close):
        (first,) = set(children(os.getpid())) - before
        os.kill(first, signal.SIGKILL)
        begun = time.monotonic()
        sleep(5.0)
        result["woken"] = time.monotonic() - begun < 4
        begun = time.monotonic()
        sleep(0.2)
        result["slept"] = time.monotonic() - begun >= 0.2
        os.write(on_task, b".")
        sleep(60.0)
        try:
            launch(1, ("plain", "change", 0))
        except OSError:
            result["refused"] = True
        os.waitpid(first, 0)
        close()

    before = set(children(os.getpid()))
    os.environ[warm.PIPES] = f"{task} {reply}"
    _flwr.import_process = lambda: None
    _flwr.run_superexec = superexec
    warm.main()
    return result


def main():
    logging.getLogger("flwr").handlers[:] = [logging.StreamHandler()]
    logging.getLogger("flwr").propagate = False
    _flwr.load_app = import_app
    _flwr.answer_message = answer
    result = {}
    for name in sys.argv[2:]:
        scenario, _, argument = name.partition(":")
        warm.LOAD_S = 0.1 if name == "too_slow" else 600.0
        forks.PROBE_S = 0.3 if name == "several:hangs" else 60.0
        node = Node()
        for file in FOLDER.glob("*.txt"):
            file.unlink()
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

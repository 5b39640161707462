"""A warm node: the process of a message is forked from one that has imported the app.

    SuperNode     Flower's, ``supernode.py``: it starts the launcher in SuperExec's place
    launcher      Flower's SuperExec, ``python -m flwr_hetero.fleet.warm``
    first parent  has imported Flower; forks the first message of a run, then its app's parent
    app's parent  has imported the app, and what it preloads; forks the process of each message
    message       Flower's ClientApp process: it ends with its message, and nothing of it is kept

Parents have one thread and no GPU, or no process is forked from them.
"""

import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from select import select
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero._flwr import pull_quickly
from flwr_hetero.client.preload import preload_all
from flwr_hetero.fleet import _flwr
from flwr_hetero.fleet.forks import (
    Generators,
    await_end,
    begin_process,
    fork,
    rest_of_process,
)

MOST_APPS = 2
"""Runs whose app a node keeps loaded."""
END_S, PROBE_S, LOAD_S = 10.0, 20.0, 600.0
"""Seconds that the process of a message has to end before the next one is begun all the same, that
one has which tries whether numerical libraries work after a fork, and that a message waits for its
app's parent."""
PIPES = "FLWR_HETERO_WARM"
"""Environment variable of a launcher: its ends of the pipes for "task" and "reply"."""

NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Environment variable: torch looks for a GPU without CUDA, which no fork could use after that."""
NO_GPU = 3
"""Exit code of a fork that cannot use CUDA any more."""

_log = logging.getLogger("flwr")


class App(NamedTuple):
    """An app as it is installed, and the settings of the node and of a run."""

    fab: tuple[str, str, str]
    """Its id, version and hash."""
    node_id: int
    node_config: dict[str, Any]
    run_config: dict[str, Any]


class Parent:
    """Forks a process for each message; the first one also starts a parent for each run's app."""

    def __init__(self, tasks: Connection, done: int, app: App | None = None) -> None:
        self.tasks, self.done, self.app = tasks, done, app
        # parents of apps, by the id of their run; a run without one is cold
        self.runs: dict[int, Connection | None] = {}
        self.warm = set[Connection]()
        self.reports: dict[Connection, tuple[int, App | None]] = {}
        # messages, until when they wait, and the process that keeps them from being given up
        self.waiting: list[tuple[int, Any, float, int]] = []
        self.child = 0
        self.seed = Generators().seed()

    @property
    def below(self) -> list[Connection]:
        """The connections to parents of apps."""
        return [above for above in self.runs.values() if above is not None]

    def serve(self) -> None:
        """Fork until the launcher, or the first parent, is gone."""
        while True:
            until_s = min((each[2] for each in self.waiting), default=inf)
            timeout_s = None if until_s == inf else max(0.0, until_s - time.monotonic())
            for ready in wait([self.tasks, *self.below, *self.reports], timeout_s):
                connection: Any = ready
                try:
                    found = connection.recv()
                except (EOFError, OSError):
                    if connection is self.tasks:
                        return
                    self._ended(connection)
                    continue
                if connection is self.tasks:
                    self._try(*found)
                elif connection not in self.reports:
                    # an app's parent is warm, or a message of it has ended
                    self.warm.add(connection)
                    self._wake()
                elif found is not None:
                    self.reports[connection] = self.reports[connection][0], found
                else:
                    self._ended(connection)
            waiting, self.waiting = self.waiting, []
            for message in waiting:
                self._try(*message)

    def _ended(self, connection: Connection) -> None:
        """Go on after the end of a message, or of an app's parent."""
        connection.close()
        for run_id in [run_id for run_id, above in self.runs.items() if above is connection]:
            self.runs[run_id] = None
            # one that was warm has been killed: the next message starts another
            if connection in self.warm:
                del self.runs[run_id]
        self.warm.discard(connection)
        if connection not in self.reports:
            return
        run_id, app = self.reports.pop(connection)
        self._wake()
        if self.app is None and app is not None and run_id not in self.runs:
            # for want of memory the run stays cold until its next message has ended
            with suppress(OSError):
                self._start_app(run_id, app)

    def _try(self, run_id: int, spec: Any, until_s: float | None = None, keeper: int = 0) -> None:
        """Launch a message; without memory or a process for it, it is the only one lost."""
        try:
            self._launch(run_id, spec, until_s, keeper)
        except OSError:
            _log.exception("a message has no process")

    def _wake(self) -> None:
        """Tell the launcher that it may ask for the next task."""
        # when the node ends it is gone
        with suppress(OSError):
            self.tasks.send(None)

    def _launch(self, run_id: int, spec: Any, until_s: float | None, keeper: int) -> None:
        """Have a message answered by the app's parent, or by a process of this one."""
        above, now_s = self.runs.get(run_id), time.monotonic()
        until_s = now_s + LOAD_S if until_s is None else until_s
        is_first = run_id not in self.runs and self.app is None
        is_loading = above is not None and above not in self.warm
        # the app's parent begins when the run's first message ends
        is_loading |= is_first and any(run_id == other for other, _ in self.reports.values())
        if is_loading and now_s < until_s:
            # on a slow device two at once would each load the app in twice the time
            self.waiting.append((run_id, spec, until_s, keeper or self._keep(spec)))
            return
        if keeper:
            with suppress(ProcessLookupError):
                os.kill(keeper, signal.SIGKILL)
        if above is not None and above in self.warm:
            with suppress(OSError):
                above.send((run_id, spec))
                return
        self._await_last()
        report, mine = Pipe(duplex=False)
        if pid := fork():
            mine.close()
            self.child, self.reports[report] = pid, (run_id, None)
            return
        with rest_of_process():
            report.close()
            self._close()
            begin_process(self.seed)

            def tell(fab: tuple[str, str, str], context: Any) -> None:
                configs = dict(context.node_config), dict(context.run_config)
                # a killed parent must not cost a message that is under way
                with suppress(OSError):
                    mine.send(App(fab, context.node_id, *configs))

            is_loaded = self.app is not None
            done = partial(os.write, self.done, b".")
            try:
                _flwr.answer_message(spec, tell, done, is_loaded=is_loaded)
            finally:
                # as at the end of a program; processes that the app leaves hold the pipe open
                threading._shutdown()  # type: ignore[attr-defined]
                with suppress(OSError):
                    mine.send(None)

    def _keep(self, spec: Any) -> int:
        """Fork a process that keeps a message from being given up: Flower does so after 30 s."""
        if keeper := fork():
            return keeper
        with rest_of_process():
            self._close()
            begin_process(self.seed)
            _flwr.keep_claim(spec)
        return 0

    def _await_last(self) -> None:
        """Let the last message's process end: it saves the state that the next one begins with."""
        if self.child and await_end(self.child, END_S) is None:
            _log.warning("the process of the last message has not ended: the next begins")
        self.child = 0
        # those that ended late, and parents of apps
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def _start_app(self, run_id: int, app: App) -> None:
        """Fork the parent of a run's app, in place of the oldest if there are too many."""
        while len(self.runs) >= MOST_APPS:
            if (oldest := self.runs.pop(next(iter(self.runs)))) is not None:
                oldest.close()
        above, below = Pipe()
        if fork():
            below.close()
            self.runs[run_id] = above
            return
        with rest_of_process():
            above.close()
            self._close()
            parent, generators = Parent(below, self.done, app), Generators()
            if why := load(app):
                text = "%s is not warm, each message has a process of its own: %s"
                _log.warning(text, app.fab[0], why)
                return
            parent.seed = generators.seed()
            # nor is the first parent there when the node ends meanwhile
            with suppress(OSError):
                below.send(None)
            parent.serve()

    def _close(self) -> None:
        """Close what only the parent uses, in a child of it."""
        for connection in (self.tasks, *self.below, *self.reports):
            connection.close()


def load(app: App) -> str:
    """Import an app and what it preloads; return why nothing may be forked then, "" if it may."""
    is_ours = NVML not in os.environ
    os.environ.setdefault(NVML, "1")
    try:
        _flwr.load_app(*app.fab)
        context = _flwr.new_context(app.node_id, app.node_config, app.run_config)
        with one_thread():
            preload_all(context)
            make_optimizer()
    # whatever the app raises, its message raises it again, and tells the server
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if is_ours:
            del os.environ[NVML]
    return why_cold()


def make_optimizer() -> None:
    """Make an optimizer of torch: with the first one it imports as much as with itself."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.optim.SGD([torch.zeros(1, requires_grad=True)])


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute without its pool: once there, it is lost in a fork, and waited for."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield
        return
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def why_cold() -> str:
    """Return why nothing may be forked from a process that has loaded an app; "" if it may."""
    when = "when it is imported, or when it preloads"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return f"it uses the GPU {when}"
    if threading.active_count() > 1 or multiprocessing.active_children():
        return f"it starts threads or processes {when}"
    if not (pid := fork()):
        with rest_of_process():
            begin_process(random.seed)
            compute(torch)
    if (code := await_end(pid, PROBE_S)) == NO_GPU:
        return f"it looks for the GPU {when}" if torch.cuda.device_count() else ""
    if code != 0:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return f"it uses pools of threads {when}"
    return ""


def compute(torch: Any) -> None:
    """Do what hangs in a fork of a process whose pool of threads was used."""
    values = np.ones((256, 256), np.float32)
    values @ values
    if torch is not None:
        tensor = torch.ones(1 << 20)
        (tensor * 2).sum(), tensor.view(1024, -1) @ tensor[:1024]
        if torch.cuda._is_in_bad_fork():
            sys.exit(NO_GPU)


def main() -> None:
    """Run the launcher, with the options of ``flower-superexec``."""
    task, done = map(int, os.environ.pop(PIPES).split())
    _flwr.import_process()
    pull_quickly()
    tasks, own = Pipe()
    if not fork():
        with rest_of_process():
            own.close()
            os.close(task)
            Parent(tasks, done).serve()
    tasks.close()
    os.close(done)

    def sleep(seconds: float) -> None:
        watched: list[Any] = [task] if own.closed else [task, own]
        ready, _, _ = select(watched, [], [], seconds)
        if task in ready:
            os.read(task, 4096)
        if own in ready:
            try:
                own.recv()
            except (EOFError, OSError):
                _log.warning("the first parent has ended: each message has a cold process")
                own.close()

    def launch(run_id: int, spec: Any) -> None:
        own.send((run_id, spec))

    _flwr.run_superexec(launch, sleep, own.close)


if __name__ == "__main__":
    main()

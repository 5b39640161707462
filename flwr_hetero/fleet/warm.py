"""A warm node: the process of a message is forked from one that has imported the app.

    SuperNode     Flower's, ``supernode.py``; it starts the launcher in place of SuperExec
    launcher      Flower's SuperExec, ``python -m flwr_hetero.fleet.warm``
    first parent  has imported Flower; forks the messages of runs whose app cannot be loaded
    app's parent  has imported the app and its preloaded data; forks the process of each message
    message       Flower's ClientApp process; it ends with its message and leaves nothing behind

The SuperNode tells the launcher of each message's run before the message can be asked for. The
launcher then waits until the app's parent is ready. It must not ask before, since Flower gives up a
message that was asked for and does not begin within 30 s.

Parents have one thread and no GPU; otherwise no process is forked from them.
"""

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from select import select
from typing import Any

from flwr_hetero._flwr import pull_quickly
from flwr_hetero.fleet import _flwr, forks

MAX_APPS = 2  # runs whose app a node keeps loaded
END_S = 10.0  # seconds that a message has to end before the next one begins
PIPES = "FLWR_HETERO_WARM"
"""Variable of a launcher: descriptors to read runs and to report replies; the folder of apps."""

NOT_WARM = "%s is not warm, so that each message starts a new process: %s"

_log = logging.getLogger("flwr")


class Parent:
    """A process that forks the process of each message, one after the other."""

    def __init__(self, done: int, *, is_loaded: bool, seed: Callable[[], object]) -> None:
        self.done = done
        self.is_loaded = is_loaded
        self.seed = seed
        self._child = 0

    def begin(self, spec: Any, inherited: Iterable[Connection]) -> None:
        """Fork the process of a message, once that of the last one has ended."""
        # The last message saves the state with which this one begins.
        if self._child and forks.await_end(self._child, END_S) is None:
            _log.warning("the process of the last message has not ended; the next one begins")
        forks.reap()
        # If forking fails, only this message is lost; keep serving the others.
        try:
            self._child = forks.start_process(partial(self._answer, spec), inherited)
        except OSError:
            self._child = 0
            _log.exception("no process could be started for a message")

    def _answer(self, spec: Any) -> None:
        forks.begin_process(self.seed)
        on_end = partial(os.write, self.done, b".")
        _flwr.answer_message(spec, on_end, is_loaded=self.is_loaded)


class FirstParent(Parent):
    """The parent of the apps' parents, and of messages whose app cannot be loaded."""

    def __init__(self, tasks: Connection, done: int, folder: Path) -> None:
        super().__init__(done, is_loaded=False, seed=forks.Generators().seed())
        self.tasks = tasks
        self.folder = folder
        # The apps' parents by run; None for a run that stays cold.
        self.apps: dict[int, Connection | None] = {}

    def serve(self) -> None:
        """Prepare runs, which come without a message, and begin messages, until the launcher ends.

        The launcher waits for None, which says that a run is prepared.
        """
        with suppress(EOFError, OSError):
            while True:
                run_id, spec = self.tasks.recv()
                if spec is not None:
                    self._begin_in(run_id, spec)
                    continue
                self._prepare(run_id)
                self.tasks.send(None)

    def _begin_in(self, run_id: int, spec: Any) -> None:
        app = self.apps.get(run_id)
        if app is not None:
            with suppress(OSError):
                app.send(spec)
                return
        self.begin(spec, self._connections())

    def _connections(self) -> list[Connection]:
        return [self.tasks, *filter(None, self.apps.values())]

    def _prepare(self, run_id: int) -> None:
        """Have the app of a run loaded, if it is not, or if its parent has ended."""
        app = self.apps.get(run_id)
        # The parent of an app sends nothing, so that only its end can be read.
        if app is not None and app.poll():
            app.close()
            del self.apps[run_id]
        # An app that could not be saved, or that was refused, has no file.
        if run_id not in self.apps and (self.folder / f"{run_id}").exists():
            self._start_app(run_id)

    def _start_app(self, run_id: int) -> None:
        """Fork the parent of a run's app, in place of the oldest one if there are too many."""
        while len(self.apps) >= MAX_APPS:
            oldest = self.apps.pop(next(iter(self.apps)))
            if oldest is not None:
                oldest.close()
        forks.reap()
        near, far = Pipe()
        serve = partial(serve_app, far, self.done, self.folder / f"{run_id}")
        self.apps[run_id] = None
        with suppress(EOFError, OSError):
            forks.start_process(serve, [near, *self._connections()])
            far.close()
            near.recv()
            self.apps[run_id] = near


def serve_app(tasks: Connection, done: int, file: Path) -> None:
    """Load an app, say so, and begin its messages until the first parent ends."""
    generators = forks.Generators()
    app = _flwr.App.read(file)
    reason = forks.load(app)
    if reason:
        _log.warning(NOT_WARM, app.fab_id, reason)
        return
    parent = Parent(done, is_loaded=True, seed=generators.seed())
    # The first parent may have ended meanwhile.
    with suppress(EOFError, OSError):
        tasks.send(None)
        while True:
            parent.begin(tasks.recv(), [tasks])


def main() -> None:
    """Run the launcher, with the options of ``flower-superexec``."""
    runs, done, folder = os.environ.pop(PIPES).split(maxsplit=2)
    run_ids, done_fd = int(runs), int(done)
    _flwr.import_process()
    pull_quickly()
    first_parent, tasks = Pipe()

    def serve() -> None:
        os.close(run_ids)
        FirstParent(tasks, done_fd, Path(folder)).serve()

    forks.start_process(serve, [first_parent])
    tasks.close()
    os.close(done_fd)

    def sleep(seconds: float) -> None:
        if not select([run_ids], [], [], seconds)[0]:
            return
        for run_id in set(os.read(run_ids, 4096).split()):
            try:
                first_parent.send((int(run_id), None))
                first_parent.recv()
            except (EOFError, OSError):
                if not first_parent.closed:
                    _log.warning("the first parent has ended: each message starts a new process")
                    first_parent.close()

    def launch(run_id: int, spec: Any) -> None:
        first_parent.send((run_id, spec))

    # The first message may have come while this process was starting.
    sleep(0.0)
    _flwr.run_superexec(launch, sleep, first_parent.close)


if __name__ == "__main__":
    # Flower interrupts a launcher whose SuperNode has ended, perhaps while it is still importing.
    with suppress(KeyboardInterrupt):
        main()

"""A warm node: the process of a message is forked from one that has imported the app.

    SuperNode     Flower's, ``supernode.py``: it starts the launcher in SuperExec's place
    launcher      Flower's SuperExec, ``python -m flwr_hetero.fleet.warm``
    first parent  has imported Flower; forks the messages of runs whose app is not loaded
    app's parent  has imported the app, and what it preloads; forks the process of each message
    message       Flower's ClientApp process: it ends with its message, and nothing of it is kept

The first message of a run installs the app, and waits until the app's parent has imported it. Then
that forks another process, which takes what the first one has pulled.

Parents have one thread and no GPU, or no process is forked from them.
"""

import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from math import inf
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from select import select
from typing import Any

from flwr_hetero._flwr import pull_quickly
from flwr_hetero.fleet import _flwr
from flwr_hetero.fleet.forks import (
    Generators,
    await_end,
    begin_process,
    fork,
    load,
    reap,
    rest_of_process,
)

MOST_APPS = 2
"""Runs whose app a node keeps loaded."""
END_S, LOAD_S = 10.0, 600.0
"""Seconds that the process of a message has to end before the next one is begun all the same, and
that a message waits for its app's parent."""
SIGNAL_S = 1.0
"""Seconds after which a message that waits looks for signals, which its other threads raise."""
PIPES = "FLWR_HETERO_WARM"
"""Environment variable of a launcher: its ends of the pipes for "task" and "reply"."""

_log = logging.getLogger("flwr")


class Order(Enum):
    """What the process of a message that waits has to do."""

    GO = "go on"
    GIVE = "give what was pulled"
    END = "end without a word"


class Parent:
    """The parent of an app: it forks a process for each message."""

    def __init__(self, tasks: Connection, done: int) -> None:
        self.tasks, self.done = tasks, done
        self.reports = set[Connection]()
        self.child = 0
        self.seed = Generators().seed()

    def serve(self) -> None:
        """Fork until the launcher, or the first parent, is gone."""
        while True:
            for ready in wait([self.tasks, *self._below()], self._pause_s()):
                connection: Any = ready
                try:
                    found = connection.recv()
                except (EOFError, OSError):
                    if connection is self.tasks:
                        return
                    self._ended(connection)
                    continue
                # without memory or a process for a message, it is the only one lost
                try:
                    self._received(connection, found)
                except OSError:
                    _log.exception("a message has no process")
                # what a message has pulled may be large
                del found
            self._go_on()

    def _below(self) -> list[Connection]:
        """Return the connections to the processes that were forked."""
        return [*self.reports]

    def _pause_s(self) -> float | None:
        """Return after how many seconds to go on without any news."""
        return None

    def _go_on(self) -> None:
        """Do what is due."""

    def _received(self, connection: Connection, found: Any) -> None:
        """Answer a message that has come, or hear that one has ended."""
        if connection is not self.tasks:
            self._ended(connection)
            return
        # it saves the state that the next one begins with
        if self.child and await_end(self.child, END_S) is None:
            _log.warning("the process of the last message has not ended: the next begins")
        self.child = 0
        reap()
        spec, given = found
        self.child, report = self._begin(spec, given=given)
        self.reports.add(report)

    def _ended(self, connection: Connection) -> None:
        """Go on after the end of a message."""
        connection.close()
        self.reports.discard(connection)
        self._wake()

    def _wake(self) -> None:
        """Tell the launcher that it may ask for the next task."""
        # when the node ends it is gone
        with suppress(OSError):
            self.tasks.send(None)

    def _begin(self, spec: Any, **options: Any) -> tuple[int, Connection]:
        """Fork the process of a message; return its id, and the connection to it."""
        above, below = Pipe()
        if pid := fork():
            below.close()
            return pid, above
        with rest_of_process():
            above.close()
            self._close()
            begin_process(self.seed)
            done = partial(os.write, self.done, b".")
            order = partial(await_order, below)
            try:
                _flwr.answer_message(spec, done, order, **options)
            finally:
                # as at the end of a program; processes that the app leaves hold the pipe open
                threading._shutdown()  # type: ignore[attr-defined]
                with suppress(OSError):
                    below.send(None)
        return 0, below

    def _close(self) -> None:
        """Close what only the parent uses, in a child of it."""
        for connection in (self.tasks, *self._below()):
            connection.close()


def await_order(above: Connection, app: _flwr.App | None = None, give: Any = bytes) -> None:
    """Wait, in the process of a message, until it is to go on; or end it."""
    # without a first parent it goes on as well
    with suppress(EOFError, OSError):
        if app is not None:
            above.send(app)
        while True:
            while not above.poll(SIGNAL_S):
                pass
            match above.recv():
                case Order.GIVE:
                    above.send_bytes(give())
                case Order.END:
                    os._exit(0)
                case _:
                    return


@dataclass
class Begun:
    """A message whose process is the first parent's."""

    run_id: int
    spec: Any
    until_s: float
    """When it goes on at the latest."""
    waits: bool = True
    """Whether it waits for an order."""
    is_pulled: bool = False


class FirstParent(Parent):
    """Begins messages until the parent of their app is warm, which then has them."""

    def __init__(self, tasks: Connection, done: int) -> None:
        super().__init__(tasks, done)
        # parents of apps, by the id of their run; a run with none is cold
        self.runs: dict[int, Connection | None] = {}
        self.warm = set[Connection]()
        self.begun: dict[Connection, Begun] = {}

    def _below(self) -> list[Connection]:
        return [above for above in self.runs.values() if above is not None] + [*self.begun]

    def _pause_s(self) -> float | None:
        until_s = min((each.until_s for each in self.begun.values() if each.waits), default=inf)
        return None if until_s == inf else max(0.0, until_s - time.monotonic())

    def _received(self, connection: Connection, found: Any) -> None:
        if connection is self.tasks:
            run_id, spec = found
            if (above := self.runs.get(run_id)) in self.warm:
                with suppress(OSError):
                    above.send((spec, b""))
                    return
            is_cold = run_id in self.runs and above is None
            until_s = time.monotonic() + (END_S if is_cold else LOAD_S)
            _, report = self._begin(spec)
            self.begun[report] = Begun(run_id, spec, until_s)
        elif connection not in self.begun:
            # an app's parent is warm, or a message of it has ended
            self.warm.add(connection)
            self._wake()
        elif found is None:
            self._ended(connection)
        else:
            message = self.begun[connection]
            message.waits = message.is_pulled = True
            if message.run_id not in self.runs:
                # for want of memory the run stays cold until its next message
                with suppress(OSError):
                    self._start_app(message.run_id, found)

    def _ended(self, connection: Connection) -> None:
        connection.close()
        for run_id in [run_id for run_id, above in self.runs.items() if above is connection]:
            # one that was warm has been killed: the next message starts another
            if connection in self.warm:
                del self.runs[run_id]
                continue
            self.runs[run_id] = None
            for message in self.begun.values():
                if message.run_id == run_id:
                    message.until_s = time.monotonic() + END_S
        self.warm.discard(connection)
        if self.begun.pop(connection, None):
            self._wake()

    def _go_on(self) -> None:
        """Give messages to the parents that are warm, or let them go on without."""
        reap()
        for report, message in list(self.begun.items()):
            if not message.waits:
                continue
            above = self.runs.get(message.run_id)
            if above in self.warm and self._hand_over(report, message, above):
                continue
            if self._is_held(message) and time.monotonic() < message.until_s:
                continue
            message.waits = False
            # one that was killed is reported next
            with suppress(OSError):
                report.send(Order.GO)

    def _is_held(self, message: Begun) -> bool:
        """Return whether a message waits for its app, or for the one before it."""
        # on a slow device two at once would each load the app in twice the time
        if self.runs.get(message.run_id) is not None:
            return True
        others = self.begun.values()
        is_next = any(not each.waits and each.run_id == message.run_id for each in others)
        return is_next and not message.is_pulled

    def _hand_over(self, report: Connection, message: Begun, above: Connection) -> bool:
        """Have an app's parent answer a message that waits; return whether it does."""
        given = b""
        try:
            if message.is_pulled:
                report.send(Order.GIVE)
                given = report.recv_bytes()
        except (EOFError, OSError):
            self._ended(report)
            return True
        try:
            above.send((message.spec, given))
        except OSError:
            return False
        with suppress(OSError):
            report.send(Order.END)
        self._ended(report)
        return True

    def _start_app(self, run_id: int, app: _flwr.App) -> None:
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
            parent, generators = Parent(below, self.done), Generators()
            if why := load(app):
                text = "%s is not warm, each message has a process of its own: %s"
                _log.warning(text, app.fab[0], why)
                return
            parent.seed = generators.seed()
            # nor is the first parent there when the node ends meanwhile
            with suppress(OSError):
                below.send(None)
            parent.serve()


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
            FirstParent(tasks, done).serve()
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

"""A warm node: the process of a message is forked from one that has imported the app.

    SuperNode     Flower's, ``supernode.py``; it starts the launcher in place of SuperExec
    launcher      Flower's SuperExec, ``python -m flwr_hetero.fleet.warm``
    first parent  has imported Flower; forks the messages of runs whose app is not loaded
    app's parent  has imported the app and its preloaded data; forks the process of each message
    message       Flower's ClientApp process; it ends with its message and leaves nothing behind

The first message of a run installs the app and waits until the app's parent has imported it. Then
the app's parent forks another process, which takes over what the first one has pulled.

Parents have one thread and no GPU; otherwise no process is forked from them.
"""

import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from multiprocessing.connection import Connection, wait
from select import select
from typing import Any

from flwr_hetero._flwr import pull_quickly
from flwr_hetero.fleet import _flwr, forks

MAX_APPS = 2  # runs whose app a node keeps loaded
LOAD_S = 600.0  # seconds that a message waits for its app's parent
END_S = 10.0  # seconds that a message has to end before the next one begins
SIGNAL_S = 1.0  # seconds after which a waiting message looks for signals from its other threads
PIPES = "FLWR_HETERO_WARM"  # variable with a launcher's pipes: for tasks, for replies

_log = logging.getLogger("flwr")


class Order(Enum):
    """What the waiting process of a message has to do next."""

    GO = "continue"
    GIVE = "send what was pulled"
    END = "exit, as another process answers the message"


class Parent:
    """The parent of an app, which forks a process for each message."""

    def __init__(self, tasks: Connection, done: int) -> None:
        self.tasks = tasks
        self.done = done
        self.reports: set[Connection] = set()
        self.child = 0
        self.seed = forks.Generators().seed()

    def serve(self) -> None:
        """Fork until the first parent has ended."""
        while self._receive():
            pass

    def _receive(self, timeout_s: float | None = None) -> bool:
        """Wait for messages and ends of messages; return whether there may be more."""
        return all(map(self._read, wait([self.tasks, *self._below()], timeout_s)))

    def _read(self, connection: Any) -> bool:
        try:
            received = connection.recv()
        except (EOFError, OSError):
            if connection is self.tasks:
                return False
            self._ended(connection)
            return True
        # If forking fails, only this message is lost; keep serving the others.
        try:
            self._received(connection, received)
        except OSError:
            _log.exception("no process could be started for a message")
        return True

    def _below(self) -> list[Connection]:
        """Return the connections to the forked processes."""
        return list(self.reports)

    def _received(self, connection: Connection, received: Any) -> None:
        """Begin a message, or note that one has ended."""
        if connection is not self.tasks:
            self._ended(connection)
            return
        # The last message saves the state with which this one begins.
        if self.child and forks.await_end(self.child, END_S) is None:
            _log.warning("the process of the last message has not ended; the next one begins")
        self.child = 0
        forks.reap()
        spec, handed_over = received
        self.child, report = self._begin(spec, handed_over=handed_over)
        self.reports.add(report)

    def _ended(self, connection: Connection) -> None:
        """Forget a message that has ended."""
        connection.close()
        self.reports.discard(connection)
        self._wake()

    def _wake(self) -> None:
        """Let the launcher ask for the next task, unless it has ended."""
        with suppress(OSError):
            self.tasks.send(None)

    def _begin(self, spec: Any, **options: Any) -> tuple[int, Connection]:
        """Fork the process of a message; return its id and the connection to it."""

        def answer(above: Connection) -> None:
            self._close()
            forks.begin_process(self.seed)
            on_end = partial(os.write, self.done, b".")
            try:
                _flwr.answer_message(spec, on_end, partial(await_order, above), **options)
            finally:
                # Wait for threads, as at the end of a program. Then report explicitly, because
                # processes that the app leaves behind keep the pipe open.
                threading._shutdown()  # type: ignore[attr-defined]
                with suppress(OSError):
                    above.send(None)

        return forks.start_process(answer)

    def _close(self) -> None:
        """Close, in a child, the connections of the parent."""
        for connection in (self.tasks, *self._below()):
            connection.close()


def await_order(above: Connection, app: _flwr.App | None = None, give: Any = bytes) -> None:
    """Wait, in the process of a message, until it may continue; or end the process."""
    # If the first parent has ended, the message continues on its own.
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
    """A message whose process the first parent has forked."""

    run_id: int
    spec: Any
    deadline_s: float  # when it continues without the app's parent
    waits: bool = True  # for an order
    is_pulled: bool = False


class FirstParent(Parent):
    """The parent of messages whose app is not loaded. All others go to their app's parent."""

    def __init__(self, tasks: Connection, done: int) -> None:
        super().__init__(tasks, done)
        # The apps' parents by run; None for a run that stays cold.
        self.apps: dict[int, Connection | None] = {}
        self.warm: set[Connection] = set()
        self.begun: dict[Connection, Begun] = {}

    def serve(self) -> None:
        """Fork until the launcher has ended."""
        while self._receive(self._timeout_s()):
            self._proceed()

    def _below(self) -> list[Connection]:
        return [*filter(None, self.apps.values()), *self.begun]

    def _timeout_s(self) -> float | None:
        """Return the seconds until the next deadline, if there is one."""
        deadlines_s = [message.deadline_s for message in self.begun.values() if message.waits]
        return max(0.0, min(deadlines_s) - time.monotonic()) if deadlines_s else None

    def _received(self, connection: Connection, received: Any) -> None:
        if connection is self.tasks:
            self._received_task(*received)
        elif connection not in self.begun:
            # An app's parent is warm, or a message of it has ended.
            self.warm.add(connection)
            self._wake()
        elif received is None:
            self._ended(connection)
        else:
            message = self.begun[connection]
            message.waits = True
            message.is_pulled = True
            if message.run_id not in self.apps:
                # If forking fails, the run stays cold until its next message.
                with suppress(OSError):
                    self._start_app(message.run_id, received)

    def _received_task(self, run_id: int, spec: Any) -> None:
        app = self.apps.get(run_id)
        if app in self.warm:
            with suppress(OSError):
                app.send((spec, b""))
                return
        is_cold = run_id in self.apps and app is None
        deadline_s = time.monotonic() + (END_S if is_cold else LOAD_S)
        _, report = self._begin(spec)
        self.begun[report] = Begun(run_id, spec, deadline_s)

    def _ended(self, connection: Connection) -> None:
        connection.close()
        for run_id in [run_id for run_id, app in self.apps.items() if app is connection]:
            if connection in self.warm:
                # It was killed; the next message starts another one.
                del self.apps[run_id]
                continue
            self.apps[run_id] = None
            for message in self.begun.values():
                if message.run_id == run_id:
                    message.deadline_s = time.monotonic() + END_S
        self.warm.discard(connection)
        if self.begun.pop(connection, None):
            self._wake()

    def _proceed(self) -> None:
        """Hand messages over to the parents that are warm, or let them continue on their own."""
        forks.reap()
        for report, message in list(self.begun.items()):
            if not message.waits:
                continue
            app = self.apps.get(message.run_id)
            if app in self.warm and self._hand_over(report, message, app):
                continue
            if self._is_held(message) and time.monotonic() < message.deadline_s:
                continue
            message.waits = False
            # The end of a process that was killed is received next.
            with suppress(OSError):
                report.send(Order.GO)

    def _is_held(self, message: Begun) -> bool:
        """Return whether a message has to wait: for its app, or for the one before it."""
        # Two processes at once would each take twice as long to load the app on a slow device.
        if self.apps.get(message.run_id) is not None:
            return True
        others = self.begun.values()
        is_next = any(not other.waits and other.run_id == message.run_id for other in others)
        return is_next and not message.is_pulled

    def _hand_over(self, report: Connection, message: Begun, app: Connection) -> bool:
        """Have an app's parent answer a waiting message; return False if it cannot."""
        pulled = b""
        try:
            if message.is_pulled:
                report.send(Order.GIVE)
                pulled = report.recv_bytes()
        except (EOFError, OSError):
            self._ended(report)
            return True
        try:
            app.send((message.spec, pulled))
        except OSError:
            return False
        with suppress(OSError):
            report.send(Order.END)
        self._ended(report)
        return True

    def _start_app(self, run_id: int, app: _flwr.App) -> None:
        """Fork the parent of a run's app, in place of the oldest one if there are too many."""
        while len(self.apps) >= MAX_APPS:
            oldest = self.apps.pop(next(iter(self.apps)))
            if oldest is not None:
                oldest.close()

        def serve(above: Connection) -> None:
            self._close()
            parent = Parent(above, self.done)
            generators = forks.Generators()
            reason = forks.load(app)
            if reason:
                text = "%s is not warm, so that each message starts a new process: %s"
                _log.warning(text, app.fab[0], reason)
                return
            parent.seed = generators.seed()
            # The node may have ended meanwhile.
            with suppress(OSError):
                above.send(None)
            parent.serve()

        _, self.apps[run_id] = forks.start_process(serve)


def main() -> None:
    """Run the launcher, with the options of ``flower-superexec``."""
    task, done = map(int, os.environ.pop(PIPES).split())
    _flwr.import_process()
    pull_quickly()

    def serve(tasks: Connection) -> None:
        os.close(task)
        FirstParent(tasks, done).serve()

    _, first_parent = forks.start_process(serve)
    os.close(done)

    def sleep(seconds: float) -> None:
        watched: list[Any] = [task] if first_parent.closed else [task, first_parent]
        ready, _, _ = select(watched, [], [], seconds)
        if task in ready:
            os.read(task, 4096)
        if first_parent in ready:
            try:
                first_parent.recv()
            except (EOFError, OSError):
                _log.warning("the first parent has ended: each message starts a new process")
                first_parent.close()

    def launch(run_id: int, spec: Any) -> None:
        first_parent.send((run_id, spec))

    _flwr.run_superexec(launch, sleep, first_parent.close)


if __name__ == "__main__":
    # Flower interrupts a launcher whose SuperNode has ended, perhaps while it is still importing.
    with suppress(KeyboardInterrupt):
        main()

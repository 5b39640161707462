"""Processes that are forked and yet begin and end as processes of their own."""

import atexit
import logging
import multiprocessing.util
import os
import random
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import ne
from typing import Any

import numpy as np

_log = logging.getLogger("flwr")


@contextmanager
def rest_of_process() -> Iterator[None]:
    """Run a block as the rest of a forked process, and end that as a program ends."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    # Ctrl-C reaches all processes of a terminal
    except KeyboardInterrupt:
        pass
    except BaseException:
        _log.exception("a warm node's process failed")
    finally:
        with suppress(Exception):
            atexit._run_exitfuncs()
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def fork() -> int:
    """Fork, without text that the child would write a second time."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    return os.fork()


def begin_process(seed: Callable[[], object]) -> None:
    """Make a fork a process of its own: what its parent does at its end is not done at each end."""
    ends: Any = weakref.finalize
    # temporary folders of the parent, which the next message needs too
    ends._registry.clear()
    ends._registered_with_atexit = False
    atexit._clear()
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    seed()


class Generators:
    """Python's and numpy's global generators: what a process begins with that has loaded an app."""

    def __init__(self) -> None:
        self.before = self._words(1)

    def _words(self, draws: int) -> tuple[Any, Any]:
        """Draw; return what the next draws leave of the states, and a seed does not."""
        for _ in range(draws):
            random.random(), np.random.random()  # noqa: NPY002
        state: Any = np.random.get_state(legacy=False)  # noqa: NPY002
        return random.getstate()[1][:-1], state["state"]["key"].tobytes()

    def seed(self) -> Callable[[], None]:
        """Return what seeds a fork: anew, or as the app has done since this was made."""
        python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
        has_python, has_numpy = map(ne, self.before, self._words(0))

        def seed() -> None:
            random.setstate(python) if has_python else random.seed()
            np.random.set_state(numpy) if has_numpy else np.random.seed()  # noqa: NPY002

        return seed


def await_end(pid: int, limit_s: float) -> int | None:
    """Wait for the end of a child; return its exit code, or None if it goes on."""
    deadline_s = time.monotonic() + limit_s
    while (found := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline_s:
            return None
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(found[1])


def reap() -> None:
    """Collect the children that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass

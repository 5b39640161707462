"""Processes that are forked and yet begin and end as processes of their own; what allows forks."""

import atexit
import logging
import multiprocessing
import multiprocessing.util
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import ne
from typing import Any

import numpy as np

from flwr_hetero.client.preload import preload_all
from flwr_hetero.fleet import _flwr
from flwr_hetero.fleet.linux import check_linux

PROBE_S = 20.0
"""Seconds of the process that tries whether numerical libraries work after a fork."""
NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Environment variable: torch looks for a GPU without CUDA, which no fork could use after that."""
NO_GPU = 3
"""Exit code of a fork that cannot use CUDA any more."""

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
    check_linux("a warm node")
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
        """Return what seeds a fork: a new seed, or what the app has set since."""
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


def load(app: _flwr.App) -> str:
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

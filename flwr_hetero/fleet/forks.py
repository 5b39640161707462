"""Forks that begin and end like processes of their own, and a check whether an app allows them."""

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
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from flwr_hetero.client.preload import preload_all
from flwr_hetero.fleet import _flwr

PROBE_S = 20.0  # seconds of the fork that tries whether numerical libraries work in it
NO_GPU = 3  # exit code of a fork that cannot use CUDA
NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With this variable, torch looks for a GPU without CUDA, which no fork could use afterwards."""

_log = logging.getLogger("flwr")


@contextmanager
def rest_of_process() -> Iterator[None]:
    """Run a block as the rest of a forked process, and end the process as a program ends."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    # Ctrl-C reaches all processes of a terminal and is no failure of this one.
    except KeyboardInterrupt:
        pass
    except BaseException:
        _log.exception("a process of a warm node has failed")
    finally:
        with suppress(Exception):
            atexit._run_exitfuncs()
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def start_process(run: Callable[[Connection], None]) -> tuple[int, Connection]:
    """Fork a process that calls a function with a connection; return its id and the other end."""
    # Otherwise the child would write buffered text a second time.
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    near, far = Pipe()
    pid = os.fork()
    if pid:
        far.close()
        return pid, near
    with rest_of_process():
        near.close()
        run(far)
    return 0, far


def begin_process(seed: Callable[[], object]) -> None:
    """Make a fork a process of its own: drop its parent's exit functions, and seed it."""
    # The finalizers would remove temporary folders that the parent still needs.
    finalize: Any = weakref.finalize
    finalize._registry.clear()
    finalize._registered_with_atexit = False
    atexit._clear()
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    seed()


class Generators:
    """Python's and numpy's global generators before an app is imported."""

    def __init__(self) -> None:
        # The first draw computes a block of numbers, from which later ones are taken.
        random.random()
        np.random.random()  # noqa: NPY002
        self._before = self._blocks()

    def _blocks(self) -> tuple[Any, Any]:
        """Return the parts of both states that a seed changes, and a few draws do not."""
        state: Any = np.random.get_state(legacy=False)  # noqa: NPY002
        return random.getstate()[1][:-1], state["state"]["key"].tobytes()

    def seed(self) -> Callable[[], None]:
        """Return a function that seeds a fork, with the app's own seed if it has set one."""
        python_state = random.getstate()
        numpy_state = np.random.get_state()  # noqa: NPY002
        blocks = self._blocks()
        has_python_seed = blocks[0] != self._before[0]
        has_numpy_seed = blocks[1] != self._before[1]

        def seed() -> None:
            random.setstate(python_state) if has_python_seed else random.seed()
            np.random.set_state(numpy_state) if has_numpy_seed else np.random.seed()  # noqa: NPY002

        return seed


def await_end(pid: int, limit_s: float) -> int | None:
    """Wait for the end of a child; return its exit code, or None if it goes on."""
    deadline_s = time.monotonic() + limit_s
    while True:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        if ended_pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline_s:
            return None
        time.sleep(0.005)


def reap() -> None:
    """Collect the children that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def load(app: _flwr.App) -> str:
    """Import an app and preload its data; return why no process may be forked, "" if one may."""
    with ExitStack() as stack:
        if NVML not in os.environ:
            os.environ[NVML] = "1"
            stack.callback(os.environ.pop, NVML, None)
        try:
            _flwr.load_app(*app.fab)
            torch: Any = sys.modules.get("torch")
            if torch is not None:
                # With one thread, torch starts no pool, for which a fork would wait forever.
                stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(1)
            preload_all(app.context)
            torch = sys.modules.get("torch")
            if torch is not None:
                # The first optimizer imports many modules.
                torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        # The message will raise the same error again and report it to the server.
        except (Exception, SystemExit) as error:
            return f"{type(error).__name__}: {error}"
    return why_not_forkable()


def why_not_forkable() -> str:
    """Return why a process that has loaded an app must not fork; "" if it may."""
    when = "when it is imported, or when it preloads"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return f"it uses the GPU {when}"
    if threading.active_count() > 1 or multiprocessing.active_children():
        return f"it starts threads or processes {when}"

    def probe(_: Connection) -> None:
        begin_process(random.seed)
        compute(torch)

    pid, _ = start_process(probe)
    code = await_end(pid, PROBE_S)
    if code == NO_GPU:
        return f"it looks for the GPU {when}" if torch.cuda.device_count() else ""
    if code == 0:
        return ""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return f"it uses pools of threads {when}"


def compute(torch: Any) -> None:
    """Compute what hangs in a fork if its parent has used a pool of threads."""
    values = np.ones((256, 256), np.float32)
    values @ values
    if torch is not None:
        tensor = torch.ones(1 << 20)
        (tensor * 2).sum()
        tensor.view(1024, -1) @ tensor[:1024]
        if torch.cuda._is_in_bad_fork():
            sys.exit(NO_GPU)

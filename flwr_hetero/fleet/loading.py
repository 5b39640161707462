"""The app of a run, imported in a parent of processes, where that can be forked afterwards."""

import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from flwr_hetero.client.preload import preload_all
from flwr_hetero.fleet import _flwr
from flwr_hetero.fleet.forks import await_end, begin_process, fork, rest_of_process

PROBE_S = 20.0
"""Seconds of the process that tries whether numerical libraries work after a fork."""
NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Environment variable: torch looks for a GPU without CUDA, which no fork could use after that."""
NO_GPU = 3
"""Exit code of a fork that cannot use CUDA any more."""


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

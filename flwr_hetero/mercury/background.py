"""Score samples in a process of its own while the update travels (Mercury's BACC, for real).

In a Flower deployment every message is handled by a fresh process that ends with its reply.
What goes on meanwhile must be detached from it, and must end by itself. The worker's lease is a
folder: it works as long as the folder is there and its time is not up. Whoever collects the
scores removes the folder; if nobody does, the worker removes it when its time is up or when it
is asked to end (SIGTERM).
"""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_hetero.client.sampled_loss import LOSS, Loss, score_batches
from flwr_hetero.errors import invalid

PREFIX = "flwr-hetero-scoring-"


SCORES, SECONDS = "scores.f8", "seconds.f8"


_START = (
    "import os, shutil, sys; os.nice(19)\n"  # torch's import, too, waits for the other work
    "try: from flwr_hetero.mercury.background import work\n"
    "except BaseException: shutil.rmtree(sys.argv[1], ignore_errors=True); raise\n"
    "work(*sys.argv[1:])"
)


_WAIT = (
    "import os, shutil, signal, sys, time\n"
    "stop = lambda *_: shutil.rmtree(sys.argv[1], ignore_errors=True) or sys.exit()\n"
    "signal.signal(signal.SIGTERM, stop)\n"
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})\n"
    "while os.path.isdir(sys.argv[1]) and time.monotonic() < float(sys.argv[2]): time.sleep(0.2)\n"
    "shutil.rmtree(sys.argv[1], ignore_errors=True)"
)


class Collected(NamedTuple):
    """What the worker got done."""

    scores: NDArray[np.float64]
    seconds: float


def start_scoring(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    kind: str = "upper",
    *,
    loss_fn: Loss = LOSS,
    batch_size: int = 256,
    limit_s: float = 600.0,
) -> str:
    """Start a detached process that scores samples by the model as it is now.

    Notes
    -----
    The worker has the lowest priority, no terminal, and no open files of its parent. On the CPU
    it scores in one thread, or in as many as the environment's ``OMP_NUM_THREADS`` says. It gets
    model and samples in a file without a name, so that the caller goes on at once and nothing
    of them is left when the worker ends. When all is scored it makes room: only a small process
    stays that waits for the collector. SIGTERM is held back wherever the worker could not clean
    up: while it starts and while the small process takes over.
    """
    if batch_size < 1:
        raise invalid("batch_size", batch_size, "be at least 1", "256 is a good size")
    if not limit_s > 0:
        raise invalid("limit_s", limit_s, "be positive", "give the longest wait for the network")
    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    job = pickle.dumps((model, inputs.cpu(), targets.cpu(), kind, loss_fn, str(where)))
    folder = tempfile.mkdtemp(prefix=PREFIX)
    command = [sys.executable, "-c", _START, folder, str(batch_size), str(limit_s)]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the worker inherits it
    try:
        with tempfile.TemporaryFile() as source:  # a pipe would block until the worker reads it
            source.write(job)
            source.seek(0)
            worker = subprocess.Popen(
                command,
                stdin=source,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1"} | os.environ | path,
            )
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    worker.returncode = 0  # it is not ours to wait for
    return folder


def collect_scores(folder: str) -> Collected:
    """Take what the worker got done so far, and end it."""
    source, taken = Path(folder), Path(f"{folder}.taken")
    if not source.name.startswith(PREFIX):
        return Collected(np.empty(0), 0.0)
    try:
        source.rename(taken)  # in one step: from now on the worker finds nothing to write to
        scores, seconds = np.fromfile(taken / SCORES), np.fromfile(taken / SECONDS)
    except OSError:
        scores = seconds = np.empty(0)
    shutil.rmtree(taken, ignore_errors=True)
    return Collected(scores, float(seconds.sum()))


def work(folder: str, batch_size: str, limit_s: str) -> None:
    """Be the worker: read a job from standard input, score until done or unwanted."""
    deadline_s = time.monotonic() + float(limit_s)
    ends = {signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    signal.signal(signal.SIGTERM, _end)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
        os.nice(19)
        _score_job(sys.stdin.buffer, Path(folder), int(batch_size), deadline_s)
        with open(os.devnull) as nothing:  # lets go of model and samples
            os.dup2(nothing.fileno(), sys.stdin.fileno())
        signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # stays so until _WAIT can clean up
        python = [sys.executable, "-I", "-S", "-c", _WAIT]
        os.execv(sys.executable, [*python, folder, str(deadline_s)])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: the second must not stop the cleaning up
    sys.exit()


def _score_job(source: BinaryIO, folder: Path, batch_size: int, deadline_s: float) -> None:
    model, inputs, targets, kind, loss_fn, where = pickle.loads(source.read())
    for first in range(0, len(inputs), batch_size):
        batch = (part[first : first + batch_size].to(where) for part in (inputs, targets))
        if not folder.is_dir() or time.monotonic() > deadline_s:
            return
        start_s = time.monotonic()
        scores = score_batches(model, [tuple(batch)], kind, loss_fn)
        try:
            _append(folder / SCORES, scores)
            _append(folder / SECONDS, np.array([time.monotonic() - start_s]))
        except FileNotFoundError:  # collected just now
            return


def _append(path: Path, values: NDArray[np.float64]) -> None:
    with path.open("ab") as file:
        file.write(values.tobytes())

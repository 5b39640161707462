"""Score samples in a process of its own while the update travels (Mercury's BACC, for real).

A Flower deployment handles every message in a process that ends with its reply. What goes on
meanwhile is detached from it: ``python -m flwr_hetero.mercury.background DIR DEADLINE < JOB`` works
as long as the folder DIR exists and the monotonic clock is before DEADLINE. The collector of the
scores removes the folder; else the worker does, at its deadline or at SIGTERM.
"""

import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor, nn

    from flwr_hetero.client.weighted_loss import Loss

PREFIX = "flwr-hetero-scoring-"
SCORES, SECONDS = "scores.f8", "seconds.f8"
MODULE = "flwr_hetero.mercury.background"


def start_scoring(
    model: "nn.Module",
    inputs: "Tensor",
    targets: "Tensor",
    *,
    loss_fn: "Loss | None" = None,
    batch_size: int = 256,
    limit_s: float = 600.0,
) -> str:
    """Start a detached process that takes samples' losses by the model now; return its folder."""
    deadline_s = time.monotonic() + limit_s
    job = pickle.dumps((model, inputs.cpu(), targets.cpu(), loss_fn, batch_size))
    folder = tempfile.mkdtemp(prefix=PREFIX)
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", MODULE, folder, str(deadline_s)]
    env = {"OMP_NUM_THREADS": "1"} | os.environ | path
    # a file without a name: a pipe would block until the worker reads it
    with tempfile.TemporaryFile() as source:
        source.write(job)
        source.seek(0)
        worker = Popen(
            command, stdin=source, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True, env=env
        )
    # it is not ours to wait for
    worker.returncode = 0
    return folder


def collect_scores(folder: str) -> tuple[NDArray[np.float64], float]:
    """Take the scores of the first samples and the seconds that they took; end the worker."""
    source, taken = Path(folder), Path(f"{folder}.taken")
    scores = seconds = np.empty(0)
    # only what a worker has made is removed
    if source.name.startswith(PREFIX):
        with suppress(OSError):
            # in one step: from now on the worker finds nothing to write to
            source.rename(taken)
            # written last
            seconds = np.fromfile(taken / SECONDS)
            scores = np.fromfile(taken / SCORES)
        shutil.rmtree(taken, ignore_errors=True)
    return scores, float(seconds.sum())


def main() -> None:
    """Score the job on standard input, then wait until the folder may go."""
    # before the job brings PyTorch; Windows has no such call
    if hasattr(os, "nice"):
        os.nice(19)
    folder, deadline_s = Path(sys.argv[1]), float(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        _score(sys.stdin.buffer.read(), folder, deadline_s)
        while folder.is_dir() and time.monotonic() < deadline_s:
            time.sleep(0.2)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _score(job: bytes, folder: Path, deadline_s: float) -> None:
    """Append scores to the folder until done or unwanted."""
    from flwr_hetero.client.weighted_loss import LOSS, score_batches  # PyTorch

    model, inputs, targets, loss_fn, batch_size = pickle.loads(job)
    device = next(model.parameters()).device
    for x, y in zip(inputs.split(batch_size), targets.split(batch_size), strict=True):
        if not folder.is_dir() or time.monotonic() > deadline_s:
            return
        start_s = time.monotonic()
        scores = score_batches(model, [(x.to(device), y.to(device))], loss_fn or LOSS)
        try:
            for name, values in ((SCORES, scores), (SECONDS, time.monotonic() - start_s)):
                with (folder / name).open("ab") as file:
                    file.write(np.asarray(values).tobytes())
        except FileNotFoundError:  # collected just now
            return


if __name__ == "__main__":
    main()

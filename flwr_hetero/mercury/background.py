"""Score samples in a detached process while the update travels (Mercury's BACC on real devices).

A Flower deployment handles every message in a process that ends with its reply, so scoring needs a
process of its own. ``python -m flwr_hetero.mercury.background DIR DEADLINE < JOB`` works as long as
the folder DIR exists and the monotonic clock is before DEADLINE. :func:`collect_scores` removes the
folder; otherwise the process removes it, at its deadline or at SIGTERM.
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
SCORES = "scores.f8"
SECONDS = "seconds.f8"
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
    """Start a detached process that scores samples with a copy of the model; return its folder."""
    deadline_s = time.monotonic() + limit_s
    job = pickle.dumps((model, inputs.cpu(), targets.cpu(), loss_fn, batch_size))
    folder = tempfile.mkdtemp(prefix=PREFIX)
    command = [sys.executable, "-m", MODULE, folder, str(deadline_s)]
    path = os.pathsep.join(filter(None, sys.path))
    env = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path}
    # The job is in a file without a name, because a pipe would block until the worker reads it.
    with tempfile.TemporaryFile() as source:
        source.write(job)
        source.seek(0)
        worker = Popen(
            command, stdin=source, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True, env=env
        )
    # Without a return code Popen would warn that nobody has waited for the process.
    worker.returncode = 0
    return folder


def collect_scores(folder: str) -> tuple[NDArray[np.float64], float]:
    """Return the scores so far and the seconds that they took; end the worker."""
    source = Path(folder)
    taken = Path(f"{folder}.taken")
    scores = np.empty(0)
    seconds = np.empty(0)
    # The name comes from a saved state, so check that the folder is one of this module.
    if source.name.startswith(PREFIX):
        with suppress(OSError):
            # After the rename the worker finds no folder to write to, and ends.
            source.rename(taken)
            # Seconds are written after their scores, so they are read before them.
            seconds = np.fromfile(taken / SECONDS)
            scores = np.fromfile(taken / SCORES)
        shutil.rmtree(taken, ignore_errors=True)
    return scores, float(seconds.sum())


def main() -> None:
    """Score the job on standard input, then wait until the scores are collected."""
    # Lower the priority before PyTorch is imported. Windows has no such call.
    if hasattr(os, "nice"):
        os.nice(19)
    folder = Path(sys.argv[1])
    deadline_s = float(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())

    def goes_on() -> bool:
        return folder.is_dir() and time.monotonic() < deadline_s

    try:
        from flwr_hetero.client.weighted_loss import LOSS, score_batches

        model, inputs, targets, loss_fn, batch_size = pickle.loads(sys.stdin.buffer.read())
        device = next(model.parameters()).device
        for x, y in zip(inputs.split(batch_size), targets.split(batch_size), strict=True):
            if not goes_on():
                break
            start_s = time.monotonic()
            scores = score_batches(model, [(x.to(device), y.to(device))], loss_fn or LOSS)
            seconds = time.monotonic() - start_s
            # If the scores are collected meanwhile, there is no folder any more.
            with suppress(FileNotFoundError):
                for name, values in ((SCORES, scores), (SECONDS, seconds)):
                    with (folder / name).open("ab") as file:
                        file.write(np.asarray(values).tobytes())
        while goes_on():
            time.sleep(0.2)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

"""Kill a run with SIGKILL at many moments and resume each: ``killed_run.py FOLDER MOMENTS``.

Moments are function calls, of Python or C, spread at random over the whole run: while nodes are
asked, while models are added up, between the history's line and the checkpoint, while either is
being written. Each run is a forked process, which spares it the imports.
"""

import os
import random
import shutil
import signal
import sys
import traceback
from itertools import pairwise
from pathlib import Path

import numpy as np
import safetensors.numpy  # noqa: F401  so that not every fork does
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAdam
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import LocalGrid, named_fleet
from flwr_hetero.report import RunDirectory
from flwr_hetero.strategy import Recorded, TiFL

ROUNDS = 5


class Keeper(RunDirectory):
    """A run directory without a report, which takes seconds."""

    def finish(self):
        (self.path / "finished").touch()
        return self.path


class Calls:
    """Count calls, and die at one of them."""

    def __init__(self, die_at: float = float("inf")):
        self.count, self.die_at = 0, die_at

    def __call__(self, frame, event, argument):
        self.count += event in ("call", "c_call")
        if self.count >= self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)


def go(folder: Path, calls: Calls, *, resume: bool = False, ended_in: int | None = None) -> None:
    """Run, or resume, to the end; SIGTERM comes in round ``ended_in``."""

    def evaluate(number, arrays):
        if number == ended_in:
            os.kill(os.getpid(), signal.SIGTERM)
        return MetricRecord({"w": float(arrays["w"].numpy()[0])})

    random.seed(99 if resume else 3)
    grid = LocalGrid(toy_app(), named_fleet("paper-5", 10))
    keeper = Keeper(folder, {"seed": 3}, resume=resume)
    phase = {"profiling": "phase", "sync_rounds": 1, "warmup_rounds": 0}
    inner = TiFL(FedAdam(), 2, 5, interval=2, credits=4, **phase)
    strategy = Recorded(inner, run_dir=keeper, resume=resume)
    sys.setprofile(calls)
    strategy.start(grid, toy_arrays(buffer=False), ROUNDS, evaluate_fn=evaluate)
    sys.setprofile(None)


def in_a_process(folder: Path, die_at: float = float("inf"), **options) -> int:
    """Go on in a child; returns what it died of, 0 if it came to its end."""
    child = os.fork()
    if not child:
        try:
            calls = Calls(die_at)
            go(folder, calls, **options)
            folder.with_suffix(".calls").write_text(str(calls.count))
        except SystemExit as error:
            os._exit(error.code)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(folder: Path, moments: int) -> None:
    """Make a whole run, one by moment that is killed and resumed, and one that SIGTERM ends."""
    assert in_a_process(folder / "whole") == 0
    count = int((folder / "whole.calls").read_text())
    bounds = np.linspace(0, 0.98 * count, moments + 1).astype(int)
    rng = np.random.default_rng(0)
    for number, (first, last) in enumerate(pairwise(bounds)):
        broken = folder / f"broken-{number}"
        assert in_a_process(broken, rng.integers(first, last)) == -signal.SIGKILL
        lines = (broken / "history.jsonl").read_text() if broken.exists() else ""
        print(lines.count("\n"), flush=True)
        has_checkpoint = any(broken.glob("checkpoint/*.npz"))
        if not has_checkpoint:  # nothing to resume: it begins again
            shutil.rmtree(broken, ignore_errors=True)
        assert in_a_process(broken, resume=has_checkpoint) == 0
    ended = folder / f"broken-{moments}"
    assert in_a_process(ended, ended_in=3) == 128 + signal.SIGTERM
    assert (ended / "finished").exists()
    assert (ended / "history.jsonl").read_text().count("\n") == 3
    assert in_a_process(ended, resume=True) == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

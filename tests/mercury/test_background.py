"""The worker as a real process once; how it ends is tested in this process."""

import os
import pickle
import signal
from contextlib import nullcontext, suppress
from functools import partial
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from waiting import wait_until

from flwr_hetero.client.weighted_loss import score_batches
from flwr_hetero.mercury import background
from flwr_hetero.mercury.background import collect_scores, start_scoring


def data(count=600):
    torch.manual_seed(0)
    return nn.Linear(4, 3), torch.randn(count, 4), torch.randint(0, 3, (count,))


def workers_of(folder: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if folder.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def scored(folder: str) -> int:
    path = Path(folder, background.SCORES)
    return path.stat().st_size // 8 if path.exists() else 0


@pytest.mark.deploy
def test_scores_are_those_of_the_model_then():
    model, inputs, targets = data()
    loss_fn = partial(cross_entropy, reduction="none", label_smoothing=0.2)
    expected = score_batches(model, [(inputs, targets)], loss_fn)
    folder = start_scoring(model, inputs, targets, loss_fn=loss_fn, batch_size=100)
    with torch.no_grad():
        model.weight.zero_()  # the worker has its own copy
    wait_until(lambda: scored(folder) == 600)
    (pid,) = workers_of(folder)
    lowest = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 19)
    assert os.getpriority(os.PRIO_PROCESS, pid) == lowest
    assert os.getsid(pid) == pid, "a session of its own"
    scores, seconds = collect_scores(folder)
    np.testing.assert_allclose(scores, expected, rtol=1e-6)
    assert seconds > 0
    assert not Path(folder).exists()
    wait_until(lambda: not workers_of(folder))


def test_killed_worker_costs_what_it_had_not_scored(tmp_path):
    folder = tmp_path / f"{background.PREFIX}killed"
    folder.mkdir()
    for name, values in ((background.SCORES, [0.5, 2.0, 9.0]), (background.SECONDS, [0.1, 0.2])):
        folder.joinpath(name).write_bytes(np.array(values).tobytes()[:-5])  # killed as it wrote
    scores, seconds = collect_scores(str(folder))
    assert (scores.tolist(), seconds) == ([0.5, 2.0], 0.1)
    assert not folder.exists()


ENDS = {
    "its time is up": (5.0, lambda folder: None, None),
    "its scores are collected": (np.inf, lambda folder: folder.rename(folder.with_name("x")), None),
    "SIGTERM": (np.inf, lambda folder: signal.raise_signal(signal.SIGTERM), SystemExit),
    "its job fails": (np.inf, pytest.fail, IndexError),
}
"""When it ends: its deadline, what happens while it waits, and what it raises."""


@pytest.mark.parametrize("why", ENDS)
def test_a_worker_that_ends_leaves_nothing_behind(why, monkeypatch, tmp_path):
    deadline_s, while_waiting, error = ENDS[why]
    folder = tmp_path / "folder"
    counts = []
    folder.mkdir()

    def sleep(seconds):
        counts.append(scored(str(folder)))
        while_waiting(folder)

    model, inputs, targets = data(3)
    if why == "its job fails":
        targets = torch.full((3,), 99)  # no such class
    job = BytesIO(pickle.dumps((model, inputs, targets, None, 1)))
    monkeypatch.delattr(os, "nice")  # as on Windows
    clock = SimpleNamespace(monotonic=lambda: float(len(counts)), sleep=sleep)
    monkeypatch.setattr(background, "time", clock)
    monkeypatch.setattr("sys.stdin", TextIOWrapper(job))
    monkeypatch.setattr("sys.argv", ["background", str(folder), str(deadline_s)])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(error) if error else nullcontext():
            background.main()
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert not folder.exists()
    assert counts[:1] == ([] if why == "its job fails" else [3])


def test_caller_continues_and_removes_only_what_a_worker_made(monkeypatch, tmp_path):
    monkeypatch.setattr(background, "MODULE", "timeit")  # never reads the job
    folder = start_scoring(*data(10**5))  # more than a pipe takes
    assert Path(folder).is_dir()
    for made, found in ((folder, False), (str(tmp_path), True)):
        scores, seconds = collect_scores(made)
        assert (len(scores), seconds) == (0, 0.0)
        assert Path(made).exists() == found

"""The worker is a real process; the tests that wait for it are marked as the slow ones."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from waiting import wait_until

from flwr_hetero.client.sampled_loss import score_batches
from flwr_hetero.mercury import background
from flwr_hetero.mercury.background import Collected, collect_scores, start_scoring


def data(count=600):
    torch.manual_seed(0)
    return nn.Linear(4, 3), torch.randn(count, 4), torch.randint(0, 3, (count,))


def workers_of(folder: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if folder.encode() in arguments:
                found.append(int(entry.name))
    return found


def scored(folder: str) -> int:
    path = Path(folder, background.SCORES)
    return path.stat().st_size // 8 if path.exists() else 0


@pytest.mark.deploy
def test_scores_are_those_of_the_model_then_and_nothing_stays_behind():
    model, inputs, targets = data()
    expected = score_batches(model, [(inputs, targets)], "loss")
    folder = start_scoring(model, inputs, targets, "loss", batch_size=100)
    with torch.no_grad():
        model.weight.zero_()  # the worker has its own copy
    (pid,) = workers_of(folder)
    wait_until(lambda: "libtorch" in Path(f"/proc/{pid}/maps").read_text(), step_s=0.01)
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19, "even while it imports torch"
    wait_until(lambda: scored(folder) == 600)
    wait_until(lambda: memory_mb(folder) < 60)  # it has made room while it waits
    collected = collect_scores(folder)
    np.testing.assert_allclose(collected.scores, expected, rtol=1e-6)
    assert collected.seconds > 0
    assert not Path(folder).exists()
    wait_until(lambda: not workers_of(folder))


def memory_mb(folder: str) -> float:
    pids = workers_of(folder)
    if len(pids) != 1:  # just being replaced
        return float("inf")
    (pid,) = pids
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


@pytest.mark.deploy
def test_the_worker_outlives_its_parent_and_yields_when_collected():
    code = (
        "import torch; from torch import nn\n"
        "from flwr_hetero.mercury.background import start_scoring\n"
        "print(start_scoring(nn.Linear(4, 3), torch.randn(10**6, 4),"
        " torch.zeros(10**6).long(), batch_size=1))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    folder = done.stdout.strip()
    wait_until(lambda: scored(folder) > 20)
    (pid,) = workers_of(folder)
    assert os.getsid(pid) == pid, "a session of its own"
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    collected = collect_scores(folder)
    assert 20 < len(collected.scores) < 10**6
    wait_until(lambda: not workers_of(folder))
    assert not Path(folder).exists()


@pytest.mark.deploy
@pytest.mark.parametrize("count", [3, 10**6], ids=["waiting", "scoring"])
def test_uncollected_it_ends_when_its_time_is_up(count):
    model, inputs, targets = data(count)
    folder = start_scoring(model, inputs, targets, batch_size=1, limit_s=3.0)
    wait_until(lambda: not Path(folder).exists())
    wait_until(lambda: not workers_of(folder))


def waits(pid: int) -> bool:
    """Whether the small process has just taken over: perhaps not a line of it has run."""
    return b"isdir" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.deploy
@pytest.mark.parametrize("when", ["it starts", "it scores", "another takes over"])
def test_asked_to_end_it_leaves_nothing_behind(when):
    count = 3 if when == "another takes over" else 10**6
    folder = start_scoring(*data(count), batch_size=1)
    wait_until(lambda: workers_of(folder), step_s=0.001)
    (pid,) = workers_of(folder)
    if when == "it scores":
        wait_until(lambda: scored(folder) >= 3)
    if when == "another takes over":
        wait_until(lambda: waits(pid), step_s=0.001)
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not workers_of(folder))
    assert not Path(folder).exists()


def test_the_caller_hears_sigterm_again(monkeypatch):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    monkeypatch.setattr(background, "_START", "")
    collect_scores(start_scoring(*data(3)))
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(OSError, match="no/such"):
        start_scoring(*data(3))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.deploy
def test_a_job_that_fails_leaves_nothing_behind():
    model, inputs, _ = data()
    folder = start_scoring(model, inputs, torch.full((600,), 99))  # no such class
    wait_until(lambda: not Path(folder).exists())
    wait_until(lambda: not workers_of(folder))
    assert collect_scores(folder) == Collected(pytest.approx(np.empty(0)), 0.0)


@pytest.mark.deploy
def test_a_worker_that_cannot_start_leaves_nothing_behind(monkeypatch, tmp_path):
    (tmp_path / "flwr_hetero.py").write_text("raise MemoryError")
    monkeypatch.chdir(tmp_path)  # where `python -c` looks first
    folder = start_scoring(*data(3))
    wait_until(lambda: not Path(folder).exists())
    wait_until(lambda: not workers_of(folder))


def test_the_caller_goes_on_before_the_worker_has_read_anything(monkeypatch):
    late = "import pathlib, sys, time; time.sleep(2); pathlib.Path(sys.argv[1], 'late').touch()"
    monkeypatch.setattr(background, "_START", late)
    folder = start_scoring(*data(10**5))  # more than a pipe takes
    assert Path(folder).is_dir()
    assert not Path(folder, "late").exists()
    collect_scores(folder)


def test_only_a_workers_folder_is_removed(tmp_path):
    assert len(collect_scores(str(tmp_path)).scores) == 0
    assert tmp_path.exists()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [({"batch_size": 0}, "batch_size must be at least 1"), ({"limit_s": 0.0}, "limit_s must be")],
)
def test_refuses(arguments, match):
    with pytest.raises(ValueError, match=match):
        start_scoring(*data(3), **arguments)

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import wait_until

from flwr_hetero.fleet.throttle import (
    BURST_S,
    CpuShare,
    Throttle,
    children,
    cpu_time_s,
    descendants,
)

SPIN = "import sys; print('up', flush=True)\nwhile True: pass"
RUN = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}]).wait()"


@given(
    share=st.floats(0.05, 1.0),
    looks=st.lists(st.floats(0.005, 0.2), min_size=5, max_size=200),
)
def test_a_greedy_device_gets_its_share_and_no_more(share, looks):
    """It runs whenever it may, for the whole time between two looks."""
    bucket, runs, used, passed = CpuShare(share), True, 0.0, 0.0
    for elapsed in looks:
        used += elapsed * runs
        passed += elapsed
        runs = bucket.may_run(elapsed, elapsed * runs)
        longest = max(looks)
        assert used <= share * (passed + BURST_S) + longest + 1e-9
        assert used >= share * passed - longest - 1e-9


def test_idle_time_is_not_saved_up():
    bucket = CpuShare(0.5)
    bucket.may_run(3600.0, 0.0)
    assert bucket.credit_s == 0.5 * BURST_S


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1, float("nan")])
def test_share_out_of_range(share):
    with pytest.raises(ValueError, match="share must lie in"):
        CpuShare(share)


@pytest.fixture
def tree():
    """Stand in for a SuperNode with its executor and a ClientApp: three generations."""
    parent = RUN.format(code=RUN.format(code=SPIN))
    top = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert top.stdout.readline() == "up\n"
    below = descendants(top.pid)
    yield top.pid, below
    for pid in (*below, top.pid):
        subprocess.run(["kill", "-9", str(pid)], check=False)
    top.wait()
    top.stdout.close()


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_only_client_apps_are_stopped_and_they_go_on_again(tree):
    supernode, (executor, client_app) = tree
    assert children(supernode) == [executor]
    assert children(executor) == [client_app]
    throttle = Throttle(0.01)
    look = partial(throttle.look, supernode)
    wait_until(lambda: is_stopped(client_app), step_s=0.001, meanwhile=look)
    assert [is_stopped(supernode), is_stopped(executor)] == [False, False]
    used = cpu_time_s(client_app)
    assert used > 0
    throttle.release(supernode)
    wait_until(lambda: cpu_time_s(client_app) > used)
    assert not is_stopped(client_app)


def test_a_stopped_client_app_goes_on_when_its_debt_is_paid(tree):
    supernode, (_, client_app) = tree
    throttle = Throttle(0.1)
    look = partial(throttle.look, supernode)
    wait_until(lambda: is_stopped(client_app), step_s=0.001, meanwhile=look)
    wait_until(lambda: not is_stopped(client_app), step_s=0.001, meanwhile=look)
    assert throttle.bucket.credit_s > 0


def test_processes_that_are_gone_count_nothing():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert cpu_time_s(done.pid) == 0.0
    assert descendants(done.pid) == []
    Throttle(0.5).look(done.pid)

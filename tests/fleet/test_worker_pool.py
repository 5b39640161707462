"""ClientApps on a pool of processes: the same results for any number, and no process left."""

import gc
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from composition_toy import composition_app
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from recording import History, timeless
from waiting import wait_until
from worker_toy import ask, failing_app

from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.fleet.faults import CORRUPTIONS
from flwr_hetero.strategy import BiasedLocalSGD, CDGraB, FedBuff, LocalSteps, OverSelect, TiFL

FAULTS = [
    *(Fault(0, "errs", 2, 2), Fault(1, "late", 1, 2, delay_s=3.0), Fault(3, "dies", 3, 3)),
    Fault(2, "garbage", 2, 2, corrupt=CORRUPTIONS[0]),
]
PROFILES = [DeviceProfile(2.0**i) for i in range(3)]
MOODY = [DeviceProfile(2.0**i, 1.0, 2.0, jitter=0.2, availability=0.9) for i in range(-3, 3)]
FLEETS = {
    "FedAdam": lambda: FedAdam(fraction_train=0.5),
    "all": lambda: TiFL(BiasedLocalSGD(CDGraB(), fast_steps=4), clients_per_round=3, num_tiers=2),
    "over-select": lambda: OverSelect(FedAvg(fraction_train=0.7), 2),
    "FedBuff": lambda: FedBuff(LocalSteps(fast_steps=4, budget="slice"), concurrency=4),
}


def run(make, workers):
    """Return the history, the model, the clock and the nodes' states after three rounds."""
    random.seed(5)
    arrays = ArrayRecord({"w": Array(np.zeros(3, np.float32))})
    with LocalGrid(composition_app(), MOODY, seed=3, faults=FAULTS, workers=workers) as grid:
        history = History(make())
        result = history.start(grid, arrays, num_rounds=3, timeout=60.0)
        states = [dict(grid.context(node).state.items()) for node in grid.get_node_ids()]
    records = [timeless(record) for record in history.records]
    return repr((records, result.arrays["w"].numpy().tobytes(), grid.virtual_time_s, states))


@pytest.mark.parametrize("name", FLEETS)
def test_results_are_the_same_for_any_number(name):
    alone = run(FLEETS[name], 0)
    assert len(alone) > 1000
    for workers in (1, 2, 3):
        assert run(FLEETS[name], workers) == alone


def draws(workers):
    """Ask two of three nodes twice in one push; return what they drew and counted, in order."""
    app = ClientApp()

    @app.train()
    def draw(message, context):
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002
        seen = context.state.config_records.setdefault("seen", ConfigRecord({"n": 0}))
        seen["n"] += 1
        metrics = MetricRecord({"drawn": drawn, "seen": seen["n"]})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    with LocalGrid(app, PROFILES, workers=workers) as grid:
        grid.leave(next(iter(grid.get_node_ids())) + 1)
        configs = [RecordDict({"config": ConfigRecord({"server-round": n})}) for n in (1, 2)]
        nodes = range(1000, 1003)
        messages = [Message(config, node, "train") for config in configs for node in nodes]
        replies = {m.metadata.reply_to_message_id: m for m in grid.send_and_receive(messages)}
    in_order = [replies[message.metadata.message_id] for message in messages]
    assert [r.error.code for r in in_order if r.has_error()] == [5, 5]
    found = [dict(reply.content["metrics"]) for reply in in_order if reply.has_content()]
    assert [record["seen"] for record in found] == [1, 1, 2, 2]
    return [record["drawn"] for record in found]


def test_what_a_node_draws_depends_on_its_message_alone():
    random.seed(7)
    torch.manual_seed(7)
    before = random.getstate(), torch.get_rng_state().tolist()
    alone = draws(0)
    assert (random.getstate(), torch.get_rng_state().tolist()) == before
    assert len({number for drawn in alone for number in drawn}) == 12
    random.seed(8)
    assert draws(0) == draws(2) == alone


# --- trouble ---------------------------------------------------------------------------


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def raise_error():
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_is_the_same_error_reply(workers):
    with LocalGrid(failing_app(raise_error), PROFILES, workers=workers) as grid:
        (error,) = [r.error for r in grid.send_and_receive(ask(grid)) if r.has_error()]
    assert (error.code, error.reason) == (2, "RuntimeError: out of memory")


def test_a_killed_worker_is_an_error():
    app = failing_app(lambda: os.kill(os.getpid(), signal.SIGKILL))
    grid = LocalGrid(app, PROFILES, workers=2)
    with pytest.raises(RuntimeError, match=r"worker .* killed .*[\[ ]1, 2\]; use fewer"):
        grid.send_and_receive(ask(grid))
    with pytest.raises(RuntimeError, match="was killed"):
        grid.send_and_receive(ask(grid))


def used_grid():
    """Use a grid and do not close it; return the process ids of its workers."""
    grid = LocalGrid(failing_app(int), PROFILES, workers=2)
    return grid, [int(r.content["metrics"]["pid"]) for r in grid.send_and_receive(ask(grid))]


def test_workers_end_with_the_grid():
    grid, pids = used_grid()
    assert os.getpid() not in pids
    del grid
    gc.collect()
    wait_until(lambda: not any(map(is_alive, pids)))


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
from worker_toy import ask, failing_app
from flwr_hetero.fleet import DeviceProfile, LocalGrid

def work():
    print("at work", flush=True)
    time.sleep(60)
grid = LocalGrid(failing_app(work if {slow} else int), [DeviceProfile()] * 3, workers=2)
pids = {{int(r.content["metrics"]["pid"]) for r in grid.send_and_receive(ask(grid))}}
print(*pids, flush=True)
if {wait}:
    time.sleep(60)
"""


def start(slow=False, wait=False):
    code = SCRIPT.format(tests=str(Path(__file__).parents[1]), slow=slow, wait=wait)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], **pipes, start_new_session=True)


def test_ctrl_c_ends_nodes_at_work():
    with start(slow=True) as process:
        assert process.stdout.readline() == "at work\n"
        began_s = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, errors = process.communicate(timeout=30)
    assert time.monotonic() - began_s < 30
    assert errors.count("KeyboardInterrupt") >= 1
    assert process.returncode != 0


@pytest.mark.nightly
def test_workers_do_not_outlive_a_killed_parent():
    with start(wait=True) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        process.kill()
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.nightly
def test_a_process_of_a_pool_ends_that_had_a_grid():
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert pool.submit(num_replies).result(timeout=300) == 3


def num_replies():
    """Run in a child: nothing closes the grid."""
    return len(used_grid()[1])


@pytest.mark.nightly
def test_no_word_at_the_end_of_a_program():
    with start() as process:
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize(
    ("platform", "cuda", "rule"),
    [("darwin", False, "be 0 or 1 on this system"), ("linux", True, "that has used the GPU")],
)
def test_refusals(platform, cuda, rule, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda)
    with pytest.raises(ValueError, match=rule):
        LocalGrid(ClientApp(), PROFILES, workers=2)

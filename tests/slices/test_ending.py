"""The end of a run: slices become equal in steps, so that FedSlice ends at FedAvg's objective."""

import logging

import numpy as np
import pytest
from flwr.app import Array
from flwr.clientapp import ClientApp
from quadratics import app, fedavg, start
from recording import History
from toy import partition_of, reply_with

from flwr_hetero.fleet import LocalGrid, named_fleet
from flwr_hetero.strategy import FedSlice
from flwr_hetero_studies.core.quiet import only_errors

NODES = 20
JOB = 20
RATE = 0.1


def noisy_app(noise, minority, seed=7):
    """Make nodes that descend on (x - goal)^2 / 2 with noise; the slowest few have their goal at 1.

    All others have theirs at 0, so that FedAvg's objective is the part of the few.
    """
    generators = [np.random.default_rng([seed, node]) for node in range(NODES)]
    client = ClientApp()

    @client.train()
    def train(message, context):
        node = partition_of(context)
        goal = 1.0 if node >= NODES - minority else 0.0
        steps = int(message.content["config"].get("num-steps", JOB))
        x = float(message.content["arrays"]["x"].numpy()[0])
        for drawn in generators[node].normal(size=steps).tolist():
            x -= RATE * (x - goal + noise * drawn)
        metrics = {"num-examples": JOB, "num-steps": steps, "examples-processed": steps}
        return reply_with(message, metrics, {"x": Array(np.array([x]))})

    return client


def end_of(strategy, noise, rounds, minority=4, seed=7):
    """Return the mean of the last models of a run."""
    grid = LocalGrid(noisy_app(noise, minority, seed), named_fleet("paper-5", NODES))
    found = []
    with only_errors():
        strategy.start(
            grid, start(2.0), rounds, evaluate_fn=lambda _, a: found.append(a["x"].numpy()[0])
        )
    return float(np.mean(found[-rounds // 4 :]))


@pytest.mark.parametrize("noise", [0.0, pytest.param(2.0, marks=pytest.mark.nightly)])
def test_slow_nodes_that_stand_alone_keep_their_part(noise):
    """The slowest fifth holds what no other node does: FedAvg's objective is 0.2."""
    # With noise single runs end between 0.1 and 0.4, as those of FedAvg do.
    seeds = range(8) if noise else [7]
    ends = [end_of(FedSlice(fedavg(), concurrency=5), noise, 60, seed=seed) for seed in seeds]
    assert 0.14 < np.mean(ends) < 0.27, ends


def slices_of(strategy, rounds, calls=1):
    """Return the steps of each node's last slice by round, of a fleet with two of each speed."""
    client = app([0.0] * 10, [JOB] * 10, 0.01)
    grid = LocalGrid(client, named_fleet("paper-5", 10))
    seen = History(strategy)
    arrays = start(1.0)
    steps = dict[str, int]()
    found = []
    with only_errors():
        for _ in range(calls):
            arrays = seen.start(grid, arrays, rounds).arrays
            for record in seen.records[len(found) + 1 :]:
                steps |= record["local_steps"]["num_steps"]
                found.append(dict(steps))
    return found


def test_slices_become_equal_in_steps():
    found = slices_of(FedSlice(fedavg(), concurrency=2), 40)
    before = found[10]
    after = found[-1]
    slow = "node-9"
    fast = "node-0"
    assert before[slow] < before[fast] / 4
    assert after[slow] == after[fast]


@pytest.mark.parametrize(("total_rounds", "calls"), [(None, 10), (30, 30)])
def test_calls_of_start_for_a_round_each_go_on_where_the_last_one_ended(
    total_rounds, calls, caplog
):
    caplog.set_level(logging.INFO, "flwr")
    strategy = FedSlice(fedavg(), concurrency=2, total_rounds=total_rounds)
    found = slices_of(strategy, 1, calls=calls)
    is_known = total_rounds is not None
    assert (found[-1]["node-9"] == found[-1]["node-0"]) == is_known
    assert strategy.rule.progress.done == (1.0 if is_known else 0.0)


def test_what_has_no_effect_says_so(caplog):
    with caplog.at_level(logging.INFO, "flwr"):
        grid = LocalGrid(app([0.0] * 4, [JOB] * 4, 0.01), named_fleet("paper-5", 4))
        strategy = FedSlice(fedavg())
        arrays = strategy.start(grid, start(1.0), 8).arrays
        strategy.start(grid, arrays, 1)
    texts = [record.getMessage() for record in caplog.records]
    assert sum("nearly all nodes train at the same time" in text for text in texts) == 1
    assert sum("FedSlice(total_rounds=...)" in text for text in texts) == 1


def test_a_model_with_running_statistics_is_not_mixed():
    """Statistics of two models fit none between them; the models of nodes start from the newest."""
    names = ["w", "norm.running_mean"]
    found = models_sent(names)
    assert all(sent == newest for sent, newest in found)
    assert any(sent != newest for sent, newest in models_sent(["w", "norm.mean"]))


def models_sent(names):
    """Return the models that nodes were sent, and the newest ones at that time."""
    client = ClientApp()
    found = []

    @client.train()
    def train(message, context):
        arrays = message.content["arrays"]
        new = {name: Array(0.9 * arrays[name].numpy()) for name in arrays}
        steps = int(message.content["config"].get("num-steps", JOB))
        metrics = {"num-examples": JOB, "num-steps": steps, "examples-processed": steps}
        return reply_with(message, metrics, new)

    class Seen(FedSlice):
        def on_instructions(self, context, messages, grid):
            newest = [array.numpy().tolist() for array in context.arrays.values()]
            sent = [m.content["arrays"] for m in messages]
            found.extend(([a.numpy().tolist() for a in each.values()], newest) for each in sent)
            return messages

    first = start(1.0)
    arrays = type(first)({name: Array(np.ones(2)) for name in names})
    grid = LocalGrid(client, named_fleet("paper-5", 10))
    with only_errors():
        Seen(fedavg(), concurrency=3).start(grid, arrays, 4)
    return found

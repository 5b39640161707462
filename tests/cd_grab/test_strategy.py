"""CDGraB: exact and sketched mode, groups that change, faults, settings.

The task is least squares with gradients by hand, in any type of floats.
"""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import FedAvg
from oracles.cd_grab import parallel_sgd
from recording import History, killed_and_resumed
from toy import app_of, partition_of, reply_with

from flwr_hetero import keys
from flwr_hetero.cd_grab.algorithm import herding_bound
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.fleet.faults import Fault
from flwr_hetero.mod import keep, timing
from flwr_hetero.sampler import OrderedSampler
from flwr_hetero.strategy import CDGraB, LocalSteps, Recorded

DIM = 5
BATCH = 2


def examples(partition, size, outlier=-1):
    """Draw a node's inputs (size, DIM) and targets (size,); those of one are 30 times as large."""
    rng = np.random.default_rng([7, partition])
    inputs = rng.standard_normal((size, DIM))
    targets = inputs @ np.arange(1, DIM + 1) + rng.standard_normal(size) + partition
    return inputs, targets * (30.0 if partition == outlier else 1.0)


def gradient(w, inputs, targets, weights):
    """Of the weighted mean of squared errors / 2."""
    return (weights * (inputs @ w - targets)) @ inputs / len(targets)


def grid_of(sizes, *, profiles=None, faults=(), lr=0.02, method="cd-grab", outlier=-1):
    """Make a fleet whose node i visits ``sizes[i]`` examples in batches of about BATCH."""

    def train(message, context):
        partition = partition_of(context)
        inputs, targets = examples(partition, sizes[partition], outlier)
        records = message.content.config_records
        sampler = OrderedSampler(len(targets), BATCH, seed=partition, method=method)
        keep(sampler, context, "order")
        sampler.follow(records.get(keys.ORDER, {}))
        w = message.content["arrays"]["w"].numpy()
        steps = int(records["config"].get(keys.NUM_STEPS, len(sampler)))
        visited = []
        for _ in range(steps):
            chosen, weights = sampler.next_batch()
            step = gradient(w, inputs[chosen], targets[chosen], weights).astype(w.dtype)
            sampler.observe(torch.from_numpy(step[None]))
            w = w - w.dtype.type(lr) * step
            visited.append(int(sampler.node_order.order[sampler.node_order.position - 1]))
        context.state["visited"] = ConfigRecord({"units": visited})
        metrics = {"num-examples": len(targets), "num-steps": steps, "loss": 0.0}
        metrics["examples-processed"] = steps * BATCH
        reply = reply_with(message, metrics, {"w": Array(w)})
        if report := sampler.report():
            reply.content[keys.ORDER] = ConfigRecord(report)
        return reply

    app = app_of(train, [timing], {"num-examples": 10})
    return LocalGrid(app, profiles or [DeviceProfile()] * len(sizes), seed=0, faults=faults)


def arrays_of(dtype=np.float32):
    return ArrayRecord({"w": Array(np.zeros(DIM, dtype))})


def visited_by_all(grid):
    """Return which units each node visited in its last round."""
    nodes = grid.get_node_ids()
    return [list(grid.context(node).state["visited"]["units"]) for node in nodes]


def fedavg():
    return FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)


class Rounds(History):
    """A run that has ended."""

    def __init__(self, strategy, grid, num_rounds, dtype=np.float32, **options):
        super().__init__(strategy)
        self.grid = grid
        self.visited = []
        self.result = self.start(grid, arrays_of(dtype), num_rounds=num_rounds, **options)

    def on_round_end(self, run, record):
        super().on_round_end(run, record)
        if record["round"]:
            self.visited.append(visited_by_all(self.grid))

    def of(self, wrapper, key):
        """What a wrapper said in each round."""
        return [record.get(wrapper, {}).get(key) for record in self.records if record["round"]]

    def reasons(self):
        """Why replies were dropped."""
        return [failure["reason"] for record in self.records for failure in record["failures"]]


def parallel_sgd_of(sizes, epochs, dtype):
    def gradients_of(i, size):
        units = OrderedSampler(size, BATCH, seed=i).units
        inputs, targets = examples(i, size, outlier=1)

        def unit_gradient(unit, w):
            chosen = units[unit]
            weights = np.full(len(chosen), len(chosen) * len(units) / size)
            return gradient(w, inputs[chosen], targets[chosen], weights)

        return unit_gradient

    each = [gradients_of(i, size) for i, size in enumerate(sizes)]
    return parallel_sgd(each, sizes[0] // BATCH, DIM, epochs, 0.02, dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sizes", [[20] * 2, [14] * 3, [12]], ids=str)
def test_exact_mode_is_the_papers_algorithm(sizes, dtype):
    epochs = 4
    units = sizes[0] // BATCH
    w, orders = parallel_sgd_of(sizes, epochs, dtype)
    strategy = CDGraB(fedavg(), mode="exact")
    strategy.update_limit = None
    rounds = Rounds(strategy, grid_of(sizes, outlier=1), epochs * units, dtype)
    # One unit per round.
    seen = [[unit for [unit] in own] for own in zip(*rounds.visited, strict=True)]
    for epoch, expected in enumerate(orders):
        assert [own[epoch * units : (epoch + 1) * units] for own in seen] == expected, epoch
    assert orders[-1] != orders[0]
    tolerance = 1e-4 if dtype == np.float32 else 1e-10
    np.testing.assert_allclose(rounds.result.arrays["w"].numpy(), w, rtol=tolerance)
    assert set(rounds.of("cd_grab", "own_share")) <= ({0.0} if len(sizes) > 1 else {0.0, 1.0})


def last_bounds(strategy, method):
    """Run 14 passes; return the rounds, and the bound of the first gradients in the last orders."""
    grid = grid_of([60] * 6, method=method, lr=0.001)
    vectors = []
    for node in range(6):
        inputs, targets = examples(node, 60)
        units = OrderedSampler(60, BATCH, seed=node).units
        w = np.zeros(DIM)
        vectors.append([gradient(w, inputs[unit], targets[unit], 1.0) for unit in units])
    rounds = Rounds(strategy, grid, 14)
    assert rounds.reasons() == []
    bounds = [herding_bound(vectors, orders) for orders in rounds.visited[-4:]]
    return rounds, np.mean(bounds)


def test_orders_of_all_nodes_go_together():
    bounds = {}
    for method in ("d-rr", "id-grab", "cd-grab"):
        strategy = CDGraB(fedavg()) if method == "cd-grab" else fedavg()
        rounds, bounds[method] = last_bounds(strategy, method)
    assert bounds["cd-grab"] < 0.7 * bounds["id-grab"] < 0.5 * bounds["d-rr"]
    assert set(rounds.of("cd_grab", "pairs")) == {6 * 15}
    assert rounds.of("cd_grab", "pairs_together") == rounds.of("cd_grab", "pairs")


@pytest.mark.parametrize("kind", ["errs", "garbage"])
def test_dropped_reply_costs_its_node_one_pass(kind):
    strategy = CDGraB(fedavg())
    grid = grid_of([20] * 3, faults=[Fault(1, kind, 3, 4)])
    rounds = Rounds(strategy, grid, 8, timeout=100.0)
    assert len(rounds.reasons()) == 2
    assert rounds.of("cd_grab", "pairs") == [15, 15, 10, 10, 15, 15, 15, 15]
    states = [strategy.server.states[f"node-{i}"] for i in range(3)]
    assert [state.version for state in states] == [8, 6, 8]
    for visited, state in zip(rounds.visited[-1], states, strict=True):
        assert visited != state.order.tolist()


def test_killed_and_resumed_equals_unbroken(tmp_path):
    """Also if rounds end within a pass, even within a pair: the steps follow measured times."""
    grids = {}

    def go(folder, evaluate_fn, resume):
        slow = [DeviceProfile(speed, uplink_mbps=0.1, downlink_mbps=0.1) for speed in (1, 2, 3)]
        grid = grids.setdefault(folder, grid_of([20] * 3, profiles=slow, lr=0.001))
        strategy = Recorded(CDGraB(LocalSteps(fedavg(), 20)), run_dir=folder, resume=resume)
        return strategy.start(grid, arrays_of(), 8, evaluate_fn=evaluate_fn)

    killed_and_resumed(go, tmp_path, killed_in=5)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("mode", "fast", "one of sketched, exact"),
        ("sketch_size", 0, "a whole number of at least 1"),
        ("num_units", 1, "a whole number of at least 2"),
        ("seed", -1, "a whole number"),
    ],
)
def test_bad_settings_are_refused(name, value, rule):
    with pytest.raises(ValueError, match=f"{name} must be {rule}"):
        CDGraB(**{name: value})

"""CDGraB: exact and sketched mode, groups that change, faults, settings."""

import numpy as np
import pytest
from oracles.cd_grab import parallel_sgd
from order_toy import BATCH, DIM, Rounds, examples, fedavg, gradient, grid_of, order_arrays, visited
from recording import killed_and_resumed

from flwr_hetero.cd_grab.algorithm import herding_bound
from flwr_hetero.cd_grab.sampler import OrderedSampler
from flwr_hetero.fleet import DeviceProfile
from flwr_hetero.fleet.faults import Fault
from flwr_hetero.strategy import CDGraB, LocalSteps, Recorded


def nodes_of(grid):
    return list(grid.get_node_ids())


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


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [([20] * 2, np.float32), ([14] * 3, np.float64), ([12], np.float64)],
    ids=str,
)
def test_exact_mode_is_the_papers_algorithm(sizes, dtype):
    epochs = 4
    units = sizes[0] // BATCH
    w, orders = parallel_sgd_of(sizes, epochs, dtype)
    grid = grid_of(sizes, outlier=1)
    strategy = CDGraB(fedavg(), mode="exact")
    strategy.update_limit = None
    seen = [[] for _ in sizes]

    def look(server_round):
        for own, node in zip(seen, nodes_of(grid) if server_round else (), strict=False):
            own += visited(grid, node)

    rounds = Rounds(strategy, grid, epochs * units, dtype, look)
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
    bounds = []

    def look(server_round):
        if server_round:
            orders = [visited(grid, node) for node in nodes_of(grid)]
            bounds.append(herding_bound(vectors, orders))

    rounds = Rounds(strategy, grid, 14, look=look)
    assert rounds.reasons() == []
    return rounds, np.mean(bounds[-4:])


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
    fault = Fault(1, kind, 3, 4)
    grid = grid_of([20] * 3, faults=[fault])
    strategy = CDGraB(fedavg())
    rounds = Rounds(strategy, grid, 8, timeout=100.0)
    assert len(rounds.reasons()) == 2
    assert rounds.of("cd_grab", "pairs") == [15, 15, 10, 10, 15, 15, 15, 15]
    states = strategy.server.states
    assert [states[f"node-{i}"].version for i in range(3)] == [8, 6, 8]
    for i, node in enumerate(nodes_of(grid)):
        assert visited(grid, node) != states[f"node-{i}"].order.tolist()


def test_killed_and_resumed_equals_unbroken(tmp_path):
    """Also if rounds end within a pass, even within a pair: the steps follow measured times."""
    grids = {}

    def go(folder, evaluate_fn, resume):
        slow = [DeviceProfile(speed, uplink_mbps=0.1, downlink_mbps=0.1) for speed in (1, 2, 3)]
        grid = grids.setdefault(folder, grid_of([20] * 3, profiles=slow, lr=0.001))
        strategy = Recorded(CDGraB(LocalSteps(fedavg(), 20)), run_dir=folder, resume=resume)
        return strategy.start(grid, order_arrays(), 8, evaluate_fn=evaluate_fn)

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

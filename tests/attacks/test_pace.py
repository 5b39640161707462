"""Votes by node, not by pace: what a node gains that replies a hundred times faster."""

import numpy as np
import pytest
from flwr.serverapp.strategy import FedMedian
from quadratics import Watched, fedavg, models
from recording import History

from flwr_hetero.strategy import FedBuff, FedSlice

NODES = 8
GOALS = [100.0] + [0.0] * (NODES - 1)
SPEEDS = [100.0, *np.linspace(1.0, 2.0, NODES - 1)]
EVEN = 1 / NODES


def run(inner=None, updates=60, limited=True, goals=GOALS, lr=0.1, **settings):
    """Return the models and the nodes of each server update; node 0 is the quick one."""
    strategy = FedBuff(inner or fedavg(), **settings)
    # the limit of updates is another defence
    strategy.update_limit = None
    strategy.node_limit = strategy.node_limit if limited else None
    history = History(strategy)
    values, _ = models(history, Watched(goals, SPEEDS, lr=lr), updates)
    return values, [record["fedbuff"]["nodes"] for record in history.records[1:]]


def share(nodes):
    """Return the part of all updates that is the quick node's, after the first ones."""
    sent = [node for update in nodes[len(nodes) // 4 :] for node in update]
    return sent.count("node-0") / len(sent)


def test_a_median_inside_holds_against_a_quick_node():
    values, nodes = run(FedMedian(fraction_evaluate=0.0), weighting="equal")
    assert np.abs(values).max() < 1
    assert all(len(set(update)) == len(update) == 4 for update in nodes)
    values, _ = run(FedMedian(fraction_evaluate=0.0), weighting="equal", limited=False)
    assert values[-1] > 90


@pytest.mark.parametrize(
    "size",
    [pytest.param(1, marks=pytest.mark.nightly), 2, pytest.param(4, marks=pytest.mark.nightly)],
)
def test_a_quick_nodes_share_has_a_limit(size):
    settings = {"weighting": "equal", "staleness": "none", "buffer_size": size, "lr": 0.01}
    settings["updates"] = 240 // size
    values, nodes = run(**settings)
    assert share(nodes) == pytest.approx(FedBuff.node_limit * EVEN, rel=0.1)
    assert values[len(values) // 4 :].mean() < 30
    values, nodes = run(**settings, limited=False)
    assert share(nodes) > 0.8
    assert values[len(values) // 4 :].mean() > 80


def test_a_quick_node_moves_the_model_no_further_at_first():
    """Before its rests are known, its rate is what the limit allows."""
    values, _ = run(goals=[1.0] * NODES, updates=3)
    assert np.abs(values).max() < 1.5


def test_no_update_waits_for_the_last_node():
    _, nodes = run(buffer_size=3 * NODES, updates=5)
    assert [len(update) for update in nodes] == [NODES - 1] * 5
    assert all(len(set(update)) == len(update) for update in nodes)


def test_equal_nodes_never_rest():
    """Each is asked again at the next server update at the latest."""
    grid = Watched([0.0] * 6, [1.0] * 6, jitter=0.3, seed=1)
    models(FedBuff(fedavg(), buffer_size=1), grid, 60)
    counts = np.bincount([node for _, node, _, _ in grid.sent], minlength=6)
    assert counts.min() >= 0.8 * counts.mean()
    assert grid.most == 6


@pytest.mark.parametrize("kind", [FedBuff, FedSlice])
def test_limit_of_a_node_is_checked_before_training(kind):
    strategy = kind(fedavg())
    strategy.node_limit = 0.5
    with pytest.raises(ValueError, match=r"node_limit must be .* got 0\.5"):
        models(strategy, Watched([0.0] * 4, [1.0] * 4), 1)
    strategy.node_limit = None
    models(strategy, Watched([0.0] * 4, [1.0] * 4), 1)

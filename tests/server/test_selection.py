import random
from pathlib import Path

import pytest
from flwr.serverapp import strategy as flower
from recording import History
from toy import toy_app, toy_arrays

from flwr_hetero.exchange.nodes import GridView
from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.strategy import RandomSelection, Selection, Wrapper


def grid_of(num_nodes, **more):
    profiles = [DeviceProfile(1 / (1 + i)) for i in range(num_nodes)]
    return LocalGrid(toy_app(), profiles=profiles, **more)


class Fastest(Selection):
    """Try each node once, then the fastest: what a new rule costs."""

    def __init__(self, strategy=None, clients_per_round=2):
        super().__init__(strategy, clients_per_round)
        self.latency_s = {}
        self.losses = []
        self.failed = []

    def select(self, context, grid, online):
        by_latency = sorted(online, key=lambda n: (self.latency_s.get(self.identity(n), 0.0), n))
        return by_latency[: self.clients_per_round]

    def on_outcome(self, context, good, failed):
        self.latency_s |= {node: outcome.latency_s for node, outcome in good.items()}
        self.losses += [outcome.metrics["train-loss"] for outcome in good.values()]
        self.failed += failed


def selected(strategy, grid, rounds):
    history = History(strategy)
    history.start(grid, toy_arrays(), rounds)
    return [record["selected"] for record in history.records[1:]]


def test_the_rule_of_the_how_to_runs():
    text = (Path(__file__).parents[2] / "docs" / "howto.md").read_text(encoding="utf-8")
    shown = text.split("## Write a strategy")[1].split("```python")[1].split("```")[0]
    names = {}
    exec(shown, names)
    assert [len(nodes) for nodes in selected(names["strategy"], grid_of(4), 2)] == [3, 3]


def test_rule_learns_from_outcomes():
    strategy = Fastest(flower.FedAvg(fraction_evaluate=0.0))
    rounds = selected(strategy, grid_of(4, faults=[Fault(1, "errs", 3, 3)]), 4)
    first = ["node-0", "node-1"]
    second = ["node-2", "node-3"]
    assert [sorted(nodes) for nodes in rounds] == [first, second, first, first]
    assert strategy.latency_s == {f"node-{i}": pytest.approx(1.0 + i) for i in range(4)}
    assert (len(strategy.losses), strategy.failed) == (7, ["node-1"])


@pytest.mark.parametrize("clients_per_round", [2, 9, None])
def test_random_draws_as_flower_does(clients_per_round):
    random.seed(7)
    count = min(clients_per_round or 5, 5)
    expected = [random.sample(range(1000, 1005), count) for _ in range(3)]
    strategy = RandomSelection(flower.FedAvg(), clients_per_round, seed=7)
    online = set(range(1000, 1005))
    assert [strategy.select(None, None, online) for r in (1, 2, 3)] == expected


def test_trained_nodes_evaluate_of_those_that_are_shown():
    class Asked(Wrapper):
        def before_evaluate(self, context, grid):
            self.nodes = sorted(grid.get_node_ids())
            return grid

    inner = Asked(flower.FedAvg())
    strategy = RandomSelection(inner, 2)
    strategy.start(grid_of(5), toy_arrays(), 1)
    assert inner.nodes == sorted(strategy.selected)
    assert len(inner.nodes) == 2
    view = strategy.before_train(1, GridView(grid_of(4), [1001, 1003]))
    assert sorted(view.get_node_ids()) == [1001, 1003]


ACCOUNTED = type("Own", (flower.FedAvg,), {"accountant": object(), "num_sampled_clients": 4})


@pytest.mark.parametrize(
    ("inner", "settings", "argument", "rule"),
    [
        (flower.FedAvg, {"clients_per_round": 0}, "clients_per_round", "at least 1"),
        (lambda: flower.FedAvg(fraction_train=0.5), {}, "FedAvg.fraction_train", "be 1.0 inside"),
        (lambda: flower.Krum(min_train_nodes=9), {}, "Krum.min_train_nodes", "at most"),
        (lambda: flower.FedAvg(min_available_nodes=3), {}, "FedAvg.min_available", "at most"),
        (flower.FedXgbCyclic, {}, "strategy", "leave the choice of nodes open"),
        (ACCOUNTED, {"clients_per_round": 4}, "strategy", "without a privacy accountant"),
    ],
)
def test_inner_selection_is_refused(inner, settings, argument, rule):
    with pytest.raises(ValueError, match=f"{argument}.* must .*{rule}"):
        Fastest(inner(), **settings)

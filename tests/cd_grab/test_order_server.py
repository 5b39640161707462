"""The order server: groups that change, lost answers, outliers, state."""

import numpy as np
import pytest

from flwr_hetero.cd_grab.algorithm import herding_bound
from flwr_hetero.cd_grab.strategy import OrderServer
from flwr_hetero.cd_grab.wire import Report


class Fleet:
    """Nodes with fixed vectors that follow the answers of an order server."""

    def __init__(self, num_nodes, num_units=64, dim=8):
        rng = np.random.default_rng(0)
        self.vectors = rng.standard_normal((num_nodes, num_units, dim))
        self.vectors -= self.vectors.mean(axis=(0, 1))
        self.orders = [np.arange(num_units) for _ in range(num_nodes)]
        self.versions = [0] * num_nodes
        self.num_units = num_units

    def follow(self, i, answer):
        if answer.order is not None:
            self.orders[i] = answer.order
            self.versions[i] = answer.version

    def report(self, i, first=0, last=None):
        seen = self.vectors[i, self.orders[i][: self.num_units // 2 * 2]]
        diffs = (seen[0::2] - seen[1::2])[first:last]
        return Report(self.versions[i], self.num_units, first, diffs)

    def reports(self, server, nodes, first=0, last=None):
        for i in nodes:
            self.follow(i, server.answer(f"node-{i}"))
        return {f"node-{i}": self.report(i, first, last) for i in nodes}

    def round(self, server, nodes, first=0, last=None):
        return server.receive(self.reports(server, nodes, first, last))

    def bound(self, nodes):
        vectors = self.vectors[list(nodes)]
        vectors = vectors - vectors.mean(axis=1, keepdims=True)
        return herding_bound(vectors, [self.orders[i] for i in nodes])


GROUPS = {
    "tiers": lambda step, rng: range(8 * (step % 2), 8 * (step % 2) + 8),
    "some missing": lambda step, rng: [i for i in range(16) if rng.random() > 0.1],
    "random": lambda step, rng: sorted(rng.choice(16, 8, replace=False)),
}


@pytest.mark.parametrize("pattern", GROUPS)
def test_group_is_never_worse_than_alone(pattern, monkeypatch):
    def settled_bound(share):
        fleet = Fleet(16)
        server = OrderServer()
        rng = np.random.default_rng(3)
        bounds = []
        with monkeypatch.context() as patch:
            if share is not None:
                fixed = lambda overlaps, num_nodes: np.full(num_nodes, share)  # noqa: E731
                patch.setattr("flwr_hetero.cd_grab.algorithm.own_share", fixed)
            for step in range(30):
                nodes = GROUPS[pattern](step, rng)
                fleet.round(server, nodes)
                bounds.append(fleet.bound(nodes))
        return np.mean(bounds[-10:])

    ours = settled_bound(None)
    alone = settled_bound(1.0)
    paper = settled_bound(0.0)
    assert ours < 1.1 * min(alone, paper)
    if pattern == "tiers":
        assert ours == paper < 0.6 * alone
    else:
        assert paper > 1.1 * ours


def test_only_nodes_side_by_side_form_a_group():
    fleet = Fleet(4)
    odd = Fleet(1, num_units=60)
    server = OrderServer()
    reports = {f"node-{i}": fleet.report(i) for i in range(2)}
    done = server.receive(reports | {"node-2": fleet.report(2, 0, 5), "odd": odd.report(0)})
    assert done.pairs == 32 + 32 + 5 + 30
    assert done.pairs_together == 64
    assert server.states["odd"].group == {"odd"}
    assert server.states["node-0"].group == {"node-0", "node-1"}
    behind = {"node-3": fleet.report(3, 0, 5), "node-2": fleet.report(2, 5, 10)}
    assert server.receive(behind).pairs_together == 0
    other_length = {"node-0": fleet.report(0, 0, 5), "odd": odd.report(0, 0, 5)}
    done = server.receive({n: r._replace(version=1) for n, r in other_length.items()})
    assert (done.pairs, done.pairs_together) == (10, 0)
    other = fleet.report(0)._replace(version=1, diffs=np.ones((32, 5)))  # vectors of a liar
    done = server.receive({"node-0": other, "node-1": fleet.report(1)._replace(version=1)})
    assert (done.pairs, done.pairs_together) == (64, 0)


@pytest.mark.parametrize("factor", [2.0, 50.0, 1e6])
def test_outlier_does_not_rule_the_signs(factor):
    """Neither one that lies nor one with odd data; in exact mode, as in the paper, it does."""
    bounds = {}
    for kind in ("without", "with", "with, exact"):
        fleet = Fleet(6)
        server = OrderServer(exact=kind == "with, exact")
        for step in range(12):
            reports = fleet.reports(server, range(6))
            noise = np.random.default_rng(step).standard_normal((32, 8))
            reports["node-0"] = reports["node-0"]._replace(diffs=factor * noise)
            if kind == "without":
                del reports["node-0"]
            server.receive(reports)
        bounds[kind] = fleet.bound(range(1, 6))
    if factor > 3:
        assert bounds["with"] == bounds["without"] < 0.3 * bounds["with, exact"]
        assert server.states["node-0"].group == {f"node-{i}" for i in range(6)}
    else:
        assert bounds["with"] == bounds["with, exact"]

"""Balancing in changing company, and the order server's books."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_hetero.cd_grab.algorithm import (
    herding_bound,
    own_share,
    pair_balance,
    relative_herding,
    reorder,
    shared_balance,
    unit_signs,
)
from flwr_hetero.cd_grab.node_order import OwnPairs
from flwr_hetero.cd_grab.order_server import OrderServer, Report


class Fleet:
    """Nodes with fixed vectors that follow the answers of an order server."""

    def __init__(self, num_nodes, num_units=64, dim=8, seed=0):
        rng = np.random.default_rng(seed)
        self.vectors = rng.standard_normal((num_nodes, num_units, dim))
        self.vectors -= self.vectors.mean(axis=(0, 1))
        self.orders = [np.arange(num_units) for _ in range(num_nodes)]
        self.versions = [0] * num_nodes
        self.num_units = num_units

    def obey(self, i, answer):
        if answer.order is not None:
            self.orders[i], self.versions[i] = answer.order, answer.version
        elif answer.version == self.versions[i] + 1:
            signs = unit_signs(answer.signs, self.num_units)
            self.orders[i], self.versions[i] = reorder(self.orders[i], signs), answer.version

    def report(self, i, first=0, last=None):
        seen = self.vectors[i, self.orders[i][: self.num_units // 2 * 2]]
        diffs = (seen[0::2] - seen[1::2])[first:last]
        return Report(f"node-{i}", self.versions[i], self.num_units, first, diffs)

    def round(self, server, nodes, first=0, last=None):
        for i in nodes:
            self.obey(i, server.answer(f"node-{i}"))
        return server.receive([self.report(i, first, last) for i in nodes])

    def bound(self, nodes):
        vectors = self.vectors[list(nodes)]
        vectors = vectors - vectors.mean(axis=1, keepdims=True)
        return herding_bound(vectors, [self.orders[i] for i in nodes])


def company_of(pattern, step, rng, num_nodes=16):
    if pattern == "all":
        return range(num_nodes)
    if pattern == "tiers":
        return range(8 * (step % 2), 8 * (step % 2) + 8)
    if pattern == "some missing":
        return [i for i in range(num_nodes) if rng.random() > 0.1]
    return sorted(rng.choice(num_nodes, 8, replace=False))


def settled_bound(pattern, share=None, monkeypatch=None):
    if share is not None:
        monkeypatch.setattr(
            "flwr_hetero.cd_grab.order_server.own_share", lambda q, m: np.full(m, share)
        )
    fleet, server, rng = Fleet(16), OrderServer(), np.random.default_rng(3)
    bounds = []
    for step in range(30):
        nodes = company_of(pattern, step, rng)
        fleet.round(server, nodes)
        bounds.append(fleet.bound(nodes))
    if share is not None:
        monkeypatch.undo()
    return np.mean(bounds[-10:])


# --- signs in changing company -----------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 99))
def test_share_zero_is_algorithm_4_and_share_one_is_each_for_itself(num_nodes, num_pairs, seed):
    diffs = np.random.default_rng(seed).standard_normal((num_nodes, num_pairs, 4))
    sums = np.zeros((num_nodes, 4))
    total, signs = shared_balance(list(sums), list(diffs), np.zeros(num_nodes))
    paper, flat = pair_balance(np.zeros(4), diffs.swapaxes(0, 1).reshape(-1, 4))
    assert np.array(signs).T.ravel().tolist() == flat.tolist()
    np.testing.assert_allclose(total, paper, atol=1e-12)
    np.testing.assert_allclose(sums.sum(axis=0), paper, atol=1e-12)
    sums = np.zeros((num_nodes, 4))
    _, signs = shared_balance(list(sums), list(diffs), np.ones(num_nodes))
    for i in range(num_nodes):
        total, alone = pair_balance(np.zeros(4), diffs[i])
        assert signs[i].tolist() == alone.tolist()
        np.testing.assert_allclose(sums[i], total, atol=1e-12)


def test_shares_in_between_by_hand():
    for share, sign in ((0.0, -1), (0.6, -1), (0.7, 1)):  # vote (1-h)(-2)(-1) + h(1)(-1)
        sums = [np.array([-3.0]), np.array([1.0])]  # together -2
        total, signs = shared_balance(sums, [np.array([[0.0]]), np.array([[-1.0]])], [0.0, share])
        assert signs[1].tolist() == [sign]
        assert sums[1].tolist() == [1.0 - sign]
        assert total.tolist() == [-2.0 - sign]


def test_a_node_with_fewer_pairs_is_done_earlier():
    diffs = np.random.default_rng(0).standard_normal((3, 6, 4))
    lengths = (4, 6, 3)
    ragged = [each[:n] for each, n in zip(diffs, lengths, strict=True)]
    total, signs = shared_balance([np.zeros(4) for _ in range(3)], ragged, np.zeros(3))
    steps = [(i, p) for p in range(6) for i in range(3) if p < lengths[i]]
    paper, flat = pair_balance(np.zeros(4), [diffs[i, p] for i, p in steps])
    assert [signs[i][p] for i, p in steps] == flat.tolist()
    np.testing.assert_allclose(total, paper, atol=1e-12)


def test_own_share_falls_with_the_company_kept():
    q = np.linspace(0, 1, 11)
    shares = own_share(q, 8)
    assert shares[0] == 1
    assert shares[-1] == 0
    assert (np.diff(shares) < 0).all()
    assert (own_share(q[1:-1], 32) > own_share(q[1:-1], 2)).all()


@pytest.mark.parametrize("pattern", ["all", "tiers", "some missing", "random"])
def test_company_never_costs_more_than_being_alone(pattern, monkeypatch):
    ours = settled_bound(pattern)
    alone = settled_bound(pattern, 1.0, monkeypatch)
    paper = settled_bound(pattern, 0.0, monkeypatch)
    assert ours < 1.1 * min(alone, paper)
    if pattern in ("all", "tiers"):
        assert ours == paper < 0.6 * alone
    else:
        assert paper > 1.1 * ours


# --- the books -----------------------------------------------------------------------------


def test_full_company_is_algorithm_4_step_by_step():
    """Whatever part of the epoch a round brings, orders are those of one whole epoch."""
    for pairs_per_round in (32, 8, 1):
        fleet, server = Fleet(4), OrderServer(exact=True)
        orders = [np.arange(64)] * 4
        for _ in range(3):
            seen = np.array([v[o] for v, o in zip(fleet.vectors, orders, strict=True)])
            diffs = (seen[:, 0::2] - seen[:, 1::2]).swapaxes(0, 1)
            _, signs = pair_balance(np.zeros(8), diffs.reshape(-1, 8))
            for first in range(0, 32, pairs_per_round):
                facts = fleet.round(server, range(4), first, first + pairs_per_round)
                assert (facts.num_pairs, facts.own_share) == (4 * pairs_per_round, 0.0)
            columns = signs.reshape(32, 4).T
            orders = [reorder(o, unit_signs(s, 64)) for o, s in zip(orders, columns, strict=True)]
            for i in range(4):
                assert server.books[f"node-{i}"].order.tolist() == orders[i].tolist()


def test_odd_orders_and_single_units():
    fleet, server = Fleet(2, num_units=7), OrderServer()
    fleet.round(server, range(2))
    assert server.books["node-0"].version == 1
    server.receive([Report("small", 0, 1, 0, np.zeros((0, 8)))])
    assert server.answer("small").signs is None


def test_only_nodes_at_the_same_place_are_balanced_together():
    fleet, odd, server = Fleet(4), Fleet(1, num_units=60), OrderServer()
    reports = [fleet.report(i) for i in range(2)]
    reports += [fleet.report(2, 0, 5), odd.report(0)._replace(node="odd")]
    facts = server.receive(reports)
    assert facts.num_pairs == 32 + 32 + 5 + 30
    assert facts.num_together == 64
    assert server.books["odd"].company == {"odd"}
    assert server.books["node-0"].company == {"node-0", "node-1"}
    behind = fleet.report(3, 0, 5), fleet.report(2, 5, 10)
    assert server.receive(behind).num_together == 0
    other_length = fleet.report(0, 0, 5), odd.report(0, 0, 5)._replace(node="odd")
    facts = server.receive(report._replace(version=1) for report in other_length)
    assert (facts.num_pairs, facts.num_together) == (10, 0)


def test_nearly_equal_orders_go_together_and_lose_little():
    sizes, num_rounds = (128, 127, 126, 129, 120), 10
    fleets, server = [Fleet(1, n, seed=n) for n in sizes], OrderServer()
    for _ in range(num_rounds):
        reports = []
        for i, fleet in enumerate(fleets):
            fleet.obey(0, server.answer(f"node-{i}"))
            reports.append(fleet.report(0)._replace(node=f"node-{i}"))
        facts = server.receive(reports)
    assert facts.num_together == 64 + 63 + 63 + 64
    assert server.books["node-4"].company == {"node-4"}
    passes = [f.vectors[0, f.orders[0]] for f in fleets[:4]]
    alone = [OwnPairs(n) for n in sizes[:4]]
    for fleet, walk in zip(fleets, alone, strict=False):
        for _ in range(num_rounds):
            walk.see(fleet.vectors[0, walk.take(len(walk.order))])
    apart = [f.vectors[0, w.order] for f, w in zip(fleets, alone, strict=False)]
    assert relative_herding(passes) < 0.8 * relative_herding(apart)


def test_an_answer_lost_or_repeated_does_no_harm():
    fleet, server = Fleet(2), OrderServer()
    fleet.round(server, range(2))
    late = fleet.report(0)  # still on version 0
    assert server.receive([late]).num_pairs == 0
    assert not server.books["node-0"].lost
    for _ in range(2):
        fleet.obey(0, server.answer("node-0"))
    assert fleet.versions[0] == 1
    assert fleet.orders[0].tolist() == server.books["node-0"].order.tolist()


def test_a_node_without_its_order_gets_it_back_whole():
    fleet, server = Fleet(3), OrderServer()
    for _ in range(4):
        fleet.round(server, range(3))
    before = server.books["node-1"].order
    fleet.orders[1], fleet.versions[1] = np.arange(64), 0
    fleet.obey(1, server.answer("node-1"))  # signs that do not fit
    assert fleet.versions[1] == 0
    server.receive([fleet.report(i) for i in (0, 2)])
    assert server.receive([fleet.report(1)]).num_pairs == 0
    answer = server.answer("node-1")
    assert answer.order.tolist() == before.tolist()
    assert answer.signs is None
    fleet.obey(1, answer)
    assert server.receive([fleet.report(1)]).num_pairs == 32
    assert server.answer("node-1").order is None


def test_a_gap_makes_the_pass_begin_anew():
    fleet, server = Fleet(1), OrderServer()
    server.receive([fleet.report(0, 0, 10)])
    assert server.receive([fleet.report(0, 20, 32)]).num_pairs == 0
    assert server.receive([fleet.report(0, 0, 32)]).num_pairs == 32
    assert server.books["node-0"].version == 1
    _, signs = pair_balance(np.zeros(8), fleet.report(0).diffs)
    assert server.answer("node-0").signs.tolist() == signs.tolist()


def test_an_order_from_before_the_servers_time_is_replaced():
    fleet, server = Fleet(1), OrderServer()
    fleet.versions[0], fleet.orders[0] = 5, np.arange(64)[::-1]
    assert server.receive([fleet.report(0)]).num_pairs == 0
    fleet.obey(0, server.answer("node-0"))
    assert (fleet.versions[0], fleet.orders[0].tolist()) == (6, list(range(64)))
    assert server.receive([fleet.report(0)]).num_pairs == 32


def test_other_data_is_another_order():
    fleet, server = Fleet(1), OrderServer()
    fleet.round(server, [0])
    other = Fleet(1, num_units=10)
    assert server.receive([other.report(0)]).num_pairs == 5
    assert len(server.books["node-0"].order) == 10


def test_a_joiner_walks_along():
    fleet, server = Fleet(4), OrderServer()
    for _ in range(3):
        fleet.round(server, range(3))
    facts = fleet.round(server, range(4))
    assert facts.num_together == facts.num_pairs == 128
    assert server.books["node-0"].overlap == pytest.approx((1 + 2 / 3) / 2)
    for _ in range(8):
        fleet.round(server, range(4))
    assert server.books["node-0"].overlap > 0.99


def test_a_better_identity_takes_the_book_along():
    fleet, server = Fleet(1), OrderServer()
    fleet.round(server, [0])
    server.rename("node-0", "jetson")
    assert server.answer("node-0").version == 0
    assert server.answer("jetson").version == 1
    server.rename("nobody", "jetson")
    fleet.versions[0] = 0
    fleet.round(server, [0])
    fleet.round(server, [0])
    server.rename("node-0", "jetson")
    assert server.answer("jetson").version == 1


@pytest.mark.parametrize("factor", [2.0, 50.0, 1e6])
def test_one_loud_node_does_not_rule_the_signs(factor):
    """Neither one that lies nor one with odd data; in exact mode, as in the paper, it does."""
    bounds = {}
    for kind in ("quiet", "loud", "loud, exact"):
        fleet, server = Fleet(6), OrderServer(exact=kind == "loud, exact")
        for step in range(12):
            for i in range(6):
                fleet.obey(i, server.answer(f"node-{i}"))
            reports = [fleet.report(i) for i in range(6)]
            noise = np.random.default_rng(step).standard_normal((32, 8))
            reports[0] = reports[0]._replace(diffs=factor * noise)
            server.receive(reports[kind == "quiet" :])
        bounds[kind] = fleet.bound(range(1, 6))
    if factor > 3:
        assert bounds["loud"] == bounds["quiet"] < 0.3 * bounds["loud, exact"]
        assert server.books["node-0"].company == {f"node-{i}" for i in range(6)}
    else:
        assert bounds["loud"] == bounds["loud, exact"]


@pytest.mark.parametrize("pairs_per_round", [1, 4])
def test_one_long_pair_does_not_make_a_node_an_outlier(pairs_per_round):
    """Real gradients differ in length; with few pairs a round that must not part the company."""
    bounds = []
    for per_round in (32, pairs_per_round):
        fleet, server = Fleet(8, dim=16), OrderServer()
        lengths = np.exp(np.random.default_rng(1).standard_normal((8, 64, 1)))
        fleet.vectors *= lengths
        fleet.vectors -= fleet.vectors.mean(axis=(0, 1))
        for _ in range(8):
            for first in range(0, 32, per_round):
                fleet.round(server, range(8), first, first + per_round)
        bounds.append(fleet.bound(range(8)))
    assert bounds[1] == bounds[0]


def test_a_node_that_was_loud_for_once_is_back_the_next_round():
    fleet, server = Fleet(4), OrderServer()
    for factor, together in ((1.0, 128), (1e30, 96), (1.0, 128)):
        for i in range(4):
            fleet.obey(i, server.answer(f"node-{i}"))
        reports = [fleet.report(i) for i in range(4)]
        reports[0] = reports[0]._replace(diffs=factor * reports[0].diffs)
        assert server.receive(reports).num_together == together
    length, _ = server.books["node-0"].measure(np.full((2, 8), 1e300))
    assert 1e30 < length < np.inf


def test_saved_and_loaded_is_uninterrupted():
    whole, broken = (Fleet(6), OrderServer()), (Fleet(6), OrderServer())
    rng = np.random.default_rng(0)
    for step in range(12):
        nodes = sorted(rng.choice(6, 3, replace=False))
        for fleet, server in (whole, broken):
            fleet.round(server, nodes, *((0, 16) if step % 3 else (0, None)))
        state = broken[1].state_dict()
        assert all(isinstance(v, (np.ndarray, int, float, str, bool)) for v in state.values())
        broken = (broken[0], OrderServer())
        broken[1].load_state_dict(state)
    for ours, theirs in zip(whole[0].orders, broken[0].orders, strict=True):
        assert ours.tolist() == theirs.tolist()
    assert whole[0].versions == broken[0].versions
    assert whole[1].books.keys() == broken[1].books.keys()
    assert all(book.overlap == broken[1].books[n].overlap for n, book in whole[1].books.items())


def test_a_state_can_be_loaded_twice():
    fleet, server = Fleet(2), OrderServer()
    fleet.round(server, range(2), 0, 4)
    state, after = server.state_dict(), []
    for _ in range(2):
        twin = OrderServer()
        twin.load_state_dict(state)
        twin.receive([fleet.report(i, 4, 8) for i in range(2)])
        after.append([book.own_sum.tolist() for book in twin.books.values()])
    assert after[0] == after[1]


def test_bad_shapes_are_refused():
    zeros = [np.zeros(3), np.zeros(3)]
    for diffs, shares in (
        ([np.zeros((4, 3)), np.zeros((4, 2))], [0, 0]),
        ([np.zeros((4, 3)), np.zeros(3)], [0, 0]),
        ([np.zeros((4, 3))], [0, 0]),
        ([np.zeros((4, 3))] * 2, [0]),
    ):
        with pytest.raises(ValueError, match="pair_diffs must have shape"):
            shared_balance(zeros, diffs, shares)


def test_whole_gradients_take_one_vector_per_node_and_one_more():
    dim, nodes = 100_000, 4
    rng = np.random.default_rng(0)
    diffs = rng.standard_normal((nodes, 1, dim), dtype=np.float32)
    server = OrderServer(exact=True)
    tracemalloc.start()
    for pair in range(3):
        server.receive([Report(f"node-{i}", 0, 8, pair, d) for i, d in enumerate(diffs)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (1 + nodes) * 4 * dim * 1.05

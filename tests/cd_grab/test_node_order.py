"""A node's orders, pass after pass, and how it follows the order server."""

import numpy as np
import pytest

from flwr_hetero.cd_grab.algorithm import pair_balance, reorder, unit_signs
from flwr_hetero.cd_grab.node_order import OwnPairs, Reshuffled, ServedOrder
from flwr_hetero.cd_grab.strategy import OrderServer
from flwr_hetero.cd_grab.wire import Answer, Terms, read_report, write_report


def vectors_of(num_units, dim=6, seed=0):
    return np.random.default_rng(seed).standard_normal((num_units, dim))


def visit(order, vectors, steps, per_step=1):
    """Visit units; all gradients are written into one buffer, as a training loop does."""
    buffer = np.empty((per_step, vectors.shape[1]))
    visited = []
    for _ in range(steps):
        units = order.next_units(per_step)
        seen = buffer[: len(units)]
        seen[...] = vectors[units]
        order.observe(seen)
        visited += units.tolist()
    buffer[...] = np.nan
    return visited


def test_reshuffling_depends_on_seed_and_pass():
    nodes = [Reshuffled(20, seed) for seed in (0, 1)]
    orders = {tuple(node.next_units(20)) for node in nodes for _ in range(3)}
    assert len(orders) == 6


@pytest.mark.parametrize("num_units", [8, 9])
def test_own_pairs_is_pair_balance_of_one_node(num_units):
    own = OwnPairs(num_units)
    vectors = vectors_of(num_units)
    order = np.arange(num_units)
    for per_step in (1, 3, num_units, 1):
        assert visit(own, vectors, -(-num_units // per_step), per_step) == order.tolist()
        even = vectors[order[: num_units // 2 * 2]]
        _, signs = pair_balance(np.zeros(6), even[0::2] - even[1::2])
        order = reorder(order, unit_signs(signs, num_units))


@pytest.mark.parametrize("num_units", [8, 9])
@pytest.mark.parametrize("steps", [1, 3, 8, 9, 11])
def test_any_steps_per_round_reach_algorithm_4(num_units, steps):
    vectors = [vectors_of(num_units, seed=s) for s in range(2)]
    terms = Terms(sketch_size=0)
    served = [ServedOrder(num_units) for _ in vectors]
    server = OrderServer(exact=True)
    orders = [np.arange(num_units)] * 2
    met = []
    for _ in range(60 * num_units // steps):
        reports = {}
        for i, order in enumerate(served):
            order.follow(server.answer(f"node-{i}"))
            visit(order, vectors[i], steps)
            reports[f"node-{i}"] = read_report(write_report(terms, order.report()), terms)
        server.receive(reports)
        met.append([order.order.tolist() for order in served])
    even = num_units // 2 * 2
    for _ in range(6):
        assert [order.tolist() for order in orders] in met
        seen = [v[o[:even]] for v, o in zip(vectors, orders, strict=True)]
        diffs = np.stack([s[0::2] - s[1::2] for s in seen], axis=1)
        _, signs = pair_balance(np.zeros(6), diffs.reshape(-1, 6))
        columns = signs.reshape(-1, 2).T
        orders = [
            reorder(o, unit_signs(s, num_units)) for o, s in zip(orders, columns, strict=True)
        ]


def test_next_order_waits_for_the_end_of_the_pass():
    vectors = vectors_of(6)
    order = ServedOrder(6)
    visit(order, vectors, 18)  # watched once per instruction
    assert (order.report().first_pair, len(order.report().diffs)) == (0, 3)
    order.follow(Answer())  # the report was lost: the pass is watched again
    visit(order, vectors, 6)
    assert len(order.report().diffs) == 3
    visit(order, vectors, 2)
    order.follow(Answer(1, np.array([1, 3, 5, 4, 2, 0])))
    assert visit(order, vectors, 4) == [2, 3, 4, 5]
    assert visit(order, vectors, 6) == [1, 3, 5, 4, 2, 0]
    seen = order.report()
    assert (seen.version, seen.first_pair, len(seen.diffs)) == (1, 0, 3)


def test_a_node_without_a_position_adopts_its_order_at_once():
    order = ServedOrder(4)
    order.follow(Answer(9, np.array([3, 2, 1, 0])))
    assert visit(order, vectors_of(4), 4) == [3, 2, 1, 0]
    assert (order.version, order.report().version) == (9, 9)

"""A node's walks through its units, and its dialogue with the order server."""

import numpy as np
import pytest

from flwr_hetero import keys
from flwr_hetero.cd_grab.algorithm import herding_bound, pair_balance, reorder, unit_signs
from flwr_hetero.cd_grab.node_order import OwnMean, OwnPairs, Reshuffled, Seen, ServedWalk, Walk
from flwr_hetero.cd_grab.order_server import Answer, OrderServer, Report
from flwr_hetero.cd_grab.wire import (
    Terms,
    read_answer,
    read_report,
    write_instruction,
    write_report,
)

ALL = [Walk, Reshuffled, OwnPairs, OwnMean, ServedWalk]


def vectors_of(num_units, dim=6, seed=0):
    return np.random.default_rng(seed).standard_normal((num_units, dim))


def visit(walk, vectors, steps, per_step=1):
    """Walk on; all gradients are written into one buffer, as a training loop does."""
    buffer, visited = np.empty((per_step, vectors.shape[1])), []
    for _ in range(steps):
        units = walk.take(per_step)
        seen = buffer[: len(units)]
        seen[...] = vectors[units]
        walk.see(seen)
        visited += units.tolist()
    buffer[...] = np.nan
    return visited


# --- every walk ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(("num_units", "per_step"), [(1, 1), (2, 1), (7, 1), (8, 3), (9, 9)])
def test_each_pass_visits_each_unit_once(kind, num_units, per_step):
    walk, vectors = kind(num_units), vectors_of(num_units)
    for _ in range(4):
        visited = visit(walk, vectors, -(-num_units // per_step), per_step)
        assert sorted(visited) == list(range(num_units))


@pytest.mark.parametrize("kind", ALL)
def test_saved_and_loaded_is_uninterrupted(kind):
    vectors = vectors_of(9)
    whole, broken = kind(9, seed=3), kind(9, seed=3)
    for steps in (4, 9, 2, 7, 13):
        here, there = visit(whole, vectors, steps), visit(broken, vectors, steps)
        assert here == there
        state = broken.state_dict()
        assert all(isinstance(v, (np.ndarray, int, float, str, bool)) for v in state.values())
        broken = kind(9)
        broken.load_state_dict(state | {"somebody else's": 1})


@pytest.mark.parametrize("kind", ALL)
def test_a_damaged_state_is_refused(kind):
    state = kind(4).state_dict()
    with pytest.raises(ValueError, match="lacks"):
        kind(4).load_state_dict({})
    with pytest.raises(ValueError, match="order must be a permutation"):
        kind(4).load_state_dict(state | {"order": np.array([0, 0, 1, 2])})
    walk = kind(4)
    for change in ({"order": np.arange(5)}, {"position": 5}, {"position": "2"}, {"seed": 1.5}):
        with pytest.raises(ValueError, match="the saved walk"):
            walk.load_state_dict(state | change)
    assert {k: str(v) for k, v in walk.state_dict().items()} == {
        k: str(v) for k, v in state.items()
    }


# --- baselines ---------------------------------------------------------------------------


def test_reshuffling_depends_on_seed_and_pass():
    orders = {
        (seed, n): tuple(walk.take(20).tolist())
        for seed in (0, 1)
        for walk in [Reshuffled(20, seed)]
        for n in range(3)
    }
    assert len(set(orders.values())) == 6


@pytest.mark.parametrize("num_units", [8, 9])
def test_own_pairs_is_pair_balancing_of_one_node(num_units):
    walk, vectors, order = OwnPairs(num_units), vectors_of(num_units), np.arange(num_units)
    for per_step in (1, 3, num_units, 1):
        assert visit(walk, vectors, -(-num_units // per_step), per_step) == order.tolist()
        even = vectors[order[: num_units // 2 * 2]]
        _, signs = pair_balance(np.zeros(6), even[0::2] - even[1::2])
        order = reorder(order, unit_signs(signs, num_units))


def test_own_mean_is_grab_with_the_mean_of_the_pass_before():
    walk, vectors, order, mean = OwnMean(8), vectors_of(8) + 3.0, np.arange(8), np.zeros(6)
    for number in range(4):
        moved = vectors + number  # gradients change from pass to pass
        assert visit(walk, moved, 8) == order.tolist()
        if number:
            np.testing.assert_allclose(walk.mean, mean)  # of gradients as they came
        signs, total = [], np.zeros(6)
        for unit in order:
            z = moved[unit] - mean
            sign = 1 if np.linalg.norm(total + z) <= np.linalg.norm(total - z) else -1
            total += sign * z
            signs.append(sign)
        order, mean = reorder(order, signs), moved.mean(axis=0)


@pytest.mark.parametrize(("kind", "factor"), [(OwnPairs, 0.35), (OwnMean, 0.35)])
def test_own_orders_beat_random_ones(kind, factor):
    vectors = vectors_of(256)
    walk = kind(256)
    for _ in range(8):
        visit(walk, vectors, 256)
    random = [herding_bound(vectors[None], [Reshuffled(256, s).order]) for s in range(9)]
    walk.turn()
    assert herding_bound(vectors[None], [walk.order]) < factor * np.mean(random)


# --- the served walk ---------------------------------------------------------------------


def test_gradients_are_copied_before_the_next_backward_pass():
    """The published code kept a reference: all differences were zero, all signs +1."""
    vectors, walk = vectors_of(6), ServedWalk(6)
    visit(walk, vectors, 6)
    expected = vectors[0::2] - vectors[1::2]
    assert np.array_equal(walk.report().diffs, expected)
    assert (expected != 0).all()


@pytest.mark.parametrize("num_units", [8, 9])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 9, 11, 16, 27])
def test_any_number_of_steps_per_round_reaches_the_orders_of_algorithm_4(num_units, steps):
    vectors = [vectors_of(num_units, seed=s) for s in range(2)]
    walks, server = [ServedWalk(num_units) for _ in vectors], OrderServer(exact=True)
    orders, met = [np.arange(num_units)] * 2, []
    for _ in range(60 * num_units // steps):
        reports = []
        for i, walk in enumerate(walks):
            walk.follow(server.answer(f"node-{i}"))
            visit(walk, vectors[i], steps)
            terms = Terms(sketch_size=0)
            record = write_report(terms, num_units, walk.report())
            reports.append(read_report(record, f"node-{i}", terms))
        server.receive(reports)
        met.append([walk.order.tolist() for walk in walks])
    for _ in range(6):
        assert [order.tolist() for order in orders] in met
        even = num_units // 2 * 2
        diffs = np.stack([v[o[0:even:2]] - v[o[1:even:2]] for v, o in zip(vectors, orders)], 1)  # noqa: B905
        _, signs = pair_balance(np.zeros(6), diffs.reshape(-1, 6))
        columns = signs.reshape(-1, 2).T
        orders = [reorder(o, unit_signs(s, num_units)) for o, s in zip(orders, columns)]  # noqa: B905


def test_a_whole_pass_is_watched_once_between_two_reports():
    vectors, walk = vectors_of(4), ServedWalk(4)
    visit(walk, vectors, 12)
    seen = walk.report()
    assert (seen.first_pair, len(seen.diffs)) == (0, 2)
    walk.follow(Answer())  # the report was lost: it is watched again
    visit(walk, vectors, 4)
    assert len(walk.report().diffs) == 2


def test_an_order_that_comes_in_the_middle_waits_for_the_end_of_the_pass():
    vectors, walk = vectors_of(6), ServedWalk(6)
    visit(walk, vectors, 8)  # two units into the second pass
    walk.report()
    walk.follow(Answer(1, signs=np.array([-1, -1, -1], np.int8)))
    assert visit(walk, vectors, 4) == [2, 3, 4, 5]
    assert visit(walk, vectors, 6) == [1, 3, 5, 4, 2, 0]
    seen = walk.report()
    assert (seen.version, seen.first_pair, len(seen.diffs)) == (1, 0, 3)


def test_half_a_pair_does_not_reach_into_the_next_pass():
    vectors, walk = vectors_of(6), ServedWalk(6)
    visit(walk, vectors, 6)
    walk.report()
    walk.follow(Answer())  # no answer yet: watched again
    visit(walk, vectors, 3)
    assert len(walk.report().diffs) == 1
    walk.follow(Answer(1, signs=np.array([1, 1, 1], np.int8)))
    assert not walk.watching  # nothing more to learn of the old order
    visit(walk, vectors, 3)
    order = visit(walk, vectors, 6)
    seen = vectors[order]
    assert np.array_equal(walk.report().diffs, seen[0::2] - seen[1::2])


def test_a_whole_order_is_taken_at_once():
    walk = ServedWalk(4)
    visit(walk, vectors_of(4), 3)
    walk.follow(Answer(9, order=np.array([3, 2, 1, 0])))
    assert visit(walk, vectors_of(4), 4) == [3, 2, 1, 0]
    assert (walk.version, walk.report().version) == (9, 9)


def test_a_whole_order_in_the_middle_of_a_pass_goes_on_from_there():
    vectors, server = vectors_of(8), OrderServer()
    whole, restarted = ServedWalk(8), ServedWalk(8)
    visit(whole, vectors, 4)
    server.receive([Report("a", 0, 8, *whole.report()[1:])])
    again = OrderServer()
    again.load_state_dict(server.state_dict())
    for walk, by in ((whole, server), (restarted, again)):
        walk.follow(read_answer(write_instruction(TERMS, by.answer("a")), 8))
        assert visit(walk, vectors, 4) == [4, 5, 6, 7]
        by.receive([Report("a", 0, 8, *walk.report()[1:])])
    assert server.books["a"].version == again.books["a"].version == 1
    assert server.books["a"].order.tolist() == again.books["a"].order.tolist()


@pytest.mark.parametrize("version", [0, 2, 5])
def test_signs_of_another_order_are_passed_over(version):
    walk = ServedWalk(4)
    walk.follow(Answer(version, signs=np.array([-1, -1], np.int8)))
    assert visit(walk, vectors_of(4), 4) == [0, 1, 2, 3]
    assert walk.version == 0


def test_what_was_seen_can_be_dropped():
    vectors, walk = vectors_of(6), ServedWalk(6)
    visit(walk, vectors, 3)
    walk.forget()
    visit(walk, vectors, 3)
    assert not len(walk.report().diffs)
    visit(walk, vectors, 6)
    assert len(walk.report().diffs) == 3


# --- messages ----------------------------------------------------------------------------

TERMS = Terms(server_round=4, sketch_size=6, sketch_seed=2, num_units=8)


def report_record(**changes):
    seen = Seen(version=1, first_pair=1, diffs=vectors_of(2).astype(np.float32))
    record = write_report(TERMS, 8, seen) | changes
    return {key: value for key, value in record.items() if value is not None}


def test_answers_survive_the_wire():
    for answer in (
        Answer(),
        Answer(3, signs=np.array([1, -1, -1, 1], np.int8)),
        Answer(4, order=np.arange(8)[::-1], first_pair=3),
    ):
        back = read_answer(write_instruction(TERMS, answer), 8)
        assert (back.version, back.first_pair) == (answer.version, answer.first_pair)
        for ours, theirs in ((answer.signs, back.signs), (answer.order, back.order)):
            assert (ours is None and theirs is None) or np.array_equal(ours, theirs)
    whole = write_instruction(TERMS, Answer(4, order=np.arange(8)))
    assert read_answer(whole, 6) == Answer()


def test_reports_survive_the_wire():
    report = read_report(report_record(), "node-0", TERMS)
    assert report[:4] == ("node-0", 1, 8, 1)
    np.testing.assert_allclose(report.diffs, vectors_of(2), atol=2e-3)
    nothing = write_report(TERMS, 8, ServedWalk(8).report())
    assert len(read_report(nothing, "node-0", TERMS).diffs) == 0
    exact = Terms(num_units=8)
    record = write_report(exact, 8, Seen(0, 0, vectors_of(2)))
    assert np.array_equal(read_report(record, "node-0", exact).diffs, vectors_of(2))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({keys.SERVER_ROUND: 3}, "of round 3 instead of 4"),
        ({keys.SKETCH_SEED: 9}, "of sketch seed 9 instead of 2"),
        ({keys.SKETCH_SIZE: 7}, "7 numbers instead of 6"),
        ({keys.SKETCH_SIZE: 5}, "whole rows of 5 float16, got 24 bytes"),
        ({keys.SKETCH_SIZE: 0}, "whole rows of 0"),
        ({keys.NUM_UNITS: 1 << 40}, "its order has 1099511627776 units"),
        ({keys.NUM_UNITS: 0}, "0 units"),
        ({keys.NUM_UNITS: 5}, r"pairs 1\.\.2 of 5 units"),
        ({keys.FIRST_PAIR: 3}, r"pairs 3\.\.4 of 8 units"),
        ({keys.FIRST_PAIR: -1}, "first-pair -1 instead of a whole number"),
        ({keys.VERSION: "1"}, "version '1' instead of a whole number"),
        ({keys.VERSION: True}, "version True instead"),
        ({keys.VERSION: None}, "version None instead"),
        ({keys.VECTORS: None}, "lacks vectors"),
        ({keys.VECTORS: "text"}, "lacks vectors"),
        ({keys.VECTORS: bytes(11)}, "whole rows"),
        ({keys.VECTORS: b"\xff\x7f" * 12}, "vectors must be finite"),
        ({keys.SCALE: float("inf")}, "vectors must be finite"),
        ({keys.SCALE: None}, "lacks vectors"),
        ({keys.DTYPE: "object"}, "dtype must be one of"),
    ],
)
def test_bad_reports_are_refused_with_a_reason(changes, reason):
    with pytest.raises(ValueError, match=reason):
        read_report(report_record(**changes), "node-0", TERMS)

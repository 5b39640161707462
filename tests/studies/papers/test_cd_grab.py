"""CD-GraB's experiments: orders of all workers, gradients of units, and claims that can fail."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flwr_hetero.cd_grab.algorithm import balance_group, herding_bound, reorder
from flwr_hetero_studies.papers.cd_grab import tasks, train
from flwr_hetero_studies.papers.cd_grab.cases import relative_herding
from flwr_hetero_studies.papers.cd_grab.orders import (
    CD_GRAB,
    EXACT,
    METHODS,
    OwnMean,
    Served,
    make_orders,
    visits,
)


@pytest.fixture(scope="module")
def table():
    return tasks.table(64, 16)


@pytest.fixture
def grains():
    return np.random.default_rng(0).normal(size=(3, 8, 5)).astype(np.float32)


@pytest.mark.parametrize("method", [CD_GRAB, *METHODS])
def test_each_pass_visits_every_unit_once(grains, method):
    found = visits(grains, method, seed=1)
    for _ in range(4):
        assert (np.sort(next(found), axis=1) == np.arange(8)).all()


def test_coordinated_pairs_get_the_signs_of_algorithm_4(grains):
    orders = make_orders(CD_GRAB, 3, 8, 0)
    for units in (slice(0, 3), slice(3, 4), slice(4, 8)):  # steps of any number of units
        orders.observe(grains[:, units])
    _, expected = balance_group([np.zeros(5)] * 3, grains[:, 0::2] - grains[:, 1::2], np.zeros(3))
    assert np.array_equal(np.array(orders.signs).T, expected)
    side_by_side = herding_bound(grains, np.tile(np.arange(8), (3, 1)))  # Eq. 8
    assert train.furthest(grains.sum(0)) == pytest.approx(side_by_side, rel=1e-5)


def test_the_package_serves_the_orders_of_algorithm_4(grains):
    paper = make_orders(CD_GRAB, 3, 8, 0)
    served = Served(EXACT, [8] * 3, seed=0)
    examples = np.array([sampler.units for sampler in served.samplers])[:, :, 0]
    worker = np.arange(3)[:, None]
    for _ in range(4):
        expected = examples[worker, paper.visit(0, 8)]
        paper.observe(grains[worker, expected])
        paper.start_pass()
        served.send(range(3))
        assert [served.visit_all(i, grains[i]).tolist() for i in range(3)] == expected.tolist()
        served.end_pass(served.reports(range(3)))


@pytest.mark.parametrize(("per_unit", "vectorised"), [(1, True), (4, True), (4, False)])
def test_gradients_of_units_average_to_that_of_all(table, per_unit, vectorised):
    task = replace(table, per_unit=per_unit, vectorised=vectorised)
    model = task.make_model(0)
    rows = np.random.default_rng(0).integers(64, size=(3, per_unit))
    gradients = train.Gradients(task, model)
    each = gradients.each(rows)
    assert each.shape == (3, 2 * 18 + 2)
    torch.testing.assert_close(each.mean(0), gradients.mean(rows))
    torch.testing.assert_close(each[1], gradients.mean(rows[1:2]))


def test_relative_herding_is_free_of_scale_and_shift():
    rng = np.random.default_rng(0)
    passes = [rng.standard_normal((n, 3)) for n in (6, 6, 4)]
    centred = [p - p.mean(axis=0) for p in passes]
    usual = np.sqrt(np.mean([np.sum(row**2) for p in centred for row in p]))
    prefixes = [sum(p[:last].sum(axis=0) for p in centred) for last in range(1, 7)]
    expected = max(np.linalg.norm(prefix) for prefix in prefixes) / usual
    assert relative_herding(passes) == pytest.approx(expected)
    moved = [1e-6 * (p + i) for i, p in enumerate(passes)]
    assert relative_herding(moved) == pytest.approx(expected)
    assert relative_herding([np.ones((4, 2))]) == 0.0


def test_own_mean_is_grab_with_the_last_mean():
    own = OwnMean(8)
    order = np.arange(8)
    mean = np.zeros(6)
    vectors = np.random.default_rng(0).standard_normal((8, 6)) + 3.0
    for number in range(4):
        moved = vectors + number  # gradients change from pass to pass
        for unit in order:
            assert own.next_units(1).tolist() == [unit]
            own.observe(moved[[unit]])
        if number:
            np.testing.assert_allclose(own.mean, mean)  # of gradients as they came
        signs = []
        total = np.zeros(6)
        for unit in order:
            z = moved[unit] - mean
            sign = 1 if np.linalg.norm(total + z) <= np.linalg.norm(total - z) else -1
            total += sign * z
            signs.append(sign)
        order = reorder(order, signs)
        mean = moved.mean(axis=0)

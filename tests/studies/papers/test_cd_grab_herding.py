"""HerdingMeter: the bound of whole passes; conformance tests have bad records."""

import numpy as np
import pytest

from flwr_hetero.cd_grab.algorithm import reorder
from flwr_hetero_studies.papers.cd_grab.herding import relative_herding
from flwr_hetero_studies.papers.cd_grab.orders import OwnMean


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


# --- GraB on each node -----------------------------------------------------------------


def test_own_mean_is_grab_with_the_last_mean():
    own = OwnMean(8)
    order = np.arange(8)
    mean = np.zeros(6)
    vectors = np.random.default_rng(0).standard_normal((8, 6)) + 3.0
    for number in range(4):
        moved = vectors + number  # gradients change from pass to pass
        for unit in order:
            assert own.next_unit() == unit
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

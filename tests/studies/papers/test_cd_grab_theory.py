"""Step sizes and constants of the theorems."""

import numpy as np
import pytest

from flwr_hetero.cd_grab.algorithm import pair_balance
from flwr_hetero_studies.papers.cd_grab import theory

GIVEN = {"smoothness": 2.0, "deviation": 1.0, "variance": 0.5, "start_gap": 3.0, "bound": 12.0}


def test_greedy_signs_keep_the_bound_of_theorem_1():
    vectors = np.random.default_rng(0).normal(size=(2000, 8))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    _, signs = pair_balance(np.zeros(8), vectors)
    furthest = np.abs(np.cumsum(signs[:, None] * vectors, axis=0)).max()
    assert furthest <= theory.balance_bound(2000, 8, 0.1) < theory.walk_constant(2000, 8, 0.1)


def test_step_size_is_the_least_of_both_terms():
    few, many = (theory.step_size(4, 16, epochs, **GIVEN) for epochs in (1, 10**9))
    assert few <= 1 / (16 * 2.0 * (2 * 16 + 12.0 / 4))
    noise = 42 * (1.0 * 12.0) ** 2 * 16 * 10**9
    assert many == pytest.approx((4 * 3.0 * 4**2 / (2.0**2 * noise)) ** (1 / 3), rel=1e-3)


@pytest.mark.parametrize("epochs", [100, 10_000])
def test_pl_step_contracts_as_far_as_the_noise_floor(epochs):
    step = theory.step_size_pl(4, 16, epochs, curvature=0.5, **GIVEN)
    w = step * epochs * 16 * 0.5 / 2
    ratio = (3.0 + 0.5 / 2.0) * 0.5**2 / (224 * (2.0 * 1.0 * 12.0) ** 2)
    assert w * np.exp(w) == pytest.approx((epochs * 4 * 16) ** 2 * ratio)


def test_twice_the_nodes_are_worth_twice_the_epochs():
    for pl in (False, True):
        assert theory.rate(8, 16, 5, pl=pl) == pytest.approx(theory.rate(4, 16, 10, pl=pl))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: theory.walk_constant(0, 1, 0.1), "num_vectors"),
        (lambda: theory.balance_bound(1, 1, 1.0), "failure"),
        (lambda: theory.step_size(1, 1, 1, **GIVEN | {"bound": 0.0}), "bound"),
        (lambda: theory.step_size_pl(1, 1, 1, curvature=-1.0, **GIVEN), "curvature"),
        (lambda: theory.rate(1, 1, 0), "epochs"),
    ],
)
def test_numbers_out_of_range_are_refused(call, name):
    with pytest.raises(ValueError, match=f"{name} must be"):
        call()

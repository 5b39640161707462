import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flwr_hetero.mercury.algorithm import error_chance, inverse_probs, mixed_probs

IMPORTANCE = arrays(np.float64, st.integers(1, 40), elements=st.floats(0, 1e6))


@given(IMPORTANCE, st.floats(0.05, 1.0))
def test_weights_recover_the_mean_exactly_and_are_bounded(
    importance: np.ndarray, mixing: float
) -> None:
    probs = mixed_probs(importance, mixing)
    assert probs.sum() == pytest.approx(1.0)
    weights = inverse_probs(probs, len(probs))
    assert weights.max() <= 1.0 / mixing * (1 + 1e-9)
    gradients = np.arange(1.0, len(probs) + 1)
    assert (probs * weights * gradients).sum() == pytest.approx(gradients.mean())


def test_without_mixing_a_zero_is_never_drawn() -> None:
    assert mixed_probs(np.array([1.0, 0.0]), 0.0).tolist() == [1.0, 0.0]
    assert mixed_probs(np.zeros(2), 0.0).tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("importance", "mixing", "match"),
    [
        ([-1.0, 1.0], 0.5, "importance must be finite and not negative"),
        ([np.nan, 1.0], 0.5, "importance must be finite and not negative"),
        ([np.inf, 1.0], 0.5, "importance must be finite and not negative"),
        ([1e39, 1.0], 0.5, "importance must be finite and not negative"),
        ([1.0, 1.0], -0.1, "mixing must lie in"),
        ([1.0, 1.0], 1.1, "mixing must lie in"),
        ([1.0, 1.0], np.nan, "mixing must lie in"),
    ],
)
def test_refuses(importance: list[float], mixing: float, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        mixed_probs(np.array(importance), mixing)


def test_the_chance_of_an_error_brackets_the_gradient_at_the_logits() -> None:
    logits = np.random.default_rng(0).normal(scale=3, size=(500, 7))
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    upper = np.linalg.norm(probs - np.eye(7)[0], axis=1)
    error = error_chance(-np.log(probs[:, 0]))
    assert (error <= upper * (1 + 1e-9)).all()
    assert (upper <= np.sqrt(2) * error * (1 + 1e-9)).all()

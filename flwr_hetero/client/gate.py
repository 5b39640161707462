"""When importance pays: the second moments of the gradient under two ways to draw."""

from math import exp
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.errors import invalid

LARGEST = float(np.finfo(np.float32).max) / 2
"""Upper bound of importance, which is kept in single precision."""
MEMORY = 2048.0
"""Samples after which the evidence of the moments has faded to 1/e."""


def check_importance(importance: NDArray[np.float64]) -> None:
    """Refuse importance that is negative or not finite in single precision."""
    bad = importance[~((importance >= 0.0) & (importance < LARGEST))]
    if bad.size:
        hint = "if the model has diverged, lower the learning rate"
        raise invalid("importance", bad[:3].tolist(), "be finite and not negative", hint)


class Moments(NamedTuple):
    """Running second moments of the gradient norm, per drawn sample."""

    uniform: float = 0.0
    importance: float = 0.0


def observe(
    moments: Moments,
    scores: NDArray[np.float64],
    weights: NDArray[np.float64],
    importance_weights: NDArray[np.float64],
) -> Moments:
    """Update both moments from samples drawn with ``weights``, whatever their distribution."""
    fade, squares = exp(-scores.size / MEMORY), weights * scores**2
    return Moments(
        fade * moments.uniform + float(squares.sum()),
        fade * moments.importance + float(squares @ importance_weights),
    )


def variance_ratio(moments: Moments) -> float:
    """Return how many uniform samples one importance draw is worth.

    With fresh importance this is the square of tau of Katharopoulos and Fleuret, "Not All Samples
    Are Created Equal", ICML 2018. Observed before the new scores are stored, it includes what a
    stale cache costs.
    """
    return moments.uniform / moments.importance if moments.importance > 0.0 else 1.0

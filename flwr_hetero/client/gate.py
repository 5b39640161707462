"""Importance sampling: probabilities and the weights that keep it unbiased (Mercury)."""

from math import exp
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.errors import invalid

LARGEST = float(np.finfo(np.float32).max) / 2
"""Importance is kept in single precision."""


def check_importance(importance: NDArray[np.float64]) -> None:
    """Refuse importance that cannot serve as a weight."""
    if importance.size and not (importance.min() >= 0.0 and importance.max() < LARGEST):
        good = (importance >= 0.0) & (importance < LARGEST)
        raise invalid(
            "importance",
            importance[~good][:3].tolist(),
            "be finite and not negative",
            "score with a loss or a norm; if the model has diverged, lower the learning rate",
        )


class Moments(NamedTuple):
    """Running second moments of the gradient norm, per drawn sample."""

    uniform: float = 0.0
    importance: float = 0.0


def observe(
    moments: Moments,
    scores: NDArray[np.float64],
    weights: NDArray[np.float64],
    importance_weights: NDArray[np.float64],
    memory: float,
) -> Moments:
    """Update both moments from one set of scored samples, however these were drawn."""
    fade, squares = exp(-scores.size / memory), weights * scores**2
    return Moments(
        fade * moments.uniform + float(squares.sum()),
        fade * moments.importance + float(squares @ importance_weights),
    )


def variance_ratio(moments: Moments) -> float:
    """Tell how many uniform samples one importance draw is worth.

    Notes
    -----
    With fresh importance this is the square of Katharopoulos and Fleuret's tau [1]_. Measured
    before the cache takes up the new scores, as here, it also shows what a stale cache costs.
    """
    return moments.uniform / moments.importance if moments.importance > 0.0 else 1.0

"""FedNova: average updates per step, so that unequal steps do not shift the objective."""

from typing import Any, ClassVar

import numpy as np
from flwr.app import Message
from flwr.serverapp.strategy import Strategy
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.biased_local_sgd.strategy import LocalSteps
from flwr_hetero.server.aggregate import normalised


def update_scales(num_steps: ArrayLike, weights: ArrayLike) -> NDArray[np.float64]:
    r"""Compute the factors that make an ordinary weighted mean FedNova's normalised one.

    .. math:: x_{t+1} - x_t = \sum_i p_i s_i (x_i - x_t), \qquad s_i = \sum_k p_k \tau_k / \tau_i

    num_steps, at least 1, and weights, not all 0: (num_replies,) -> (num_replies,).

    >>> update_scales([1, 3], [1.0, 1.0])
    array([2.        , 0.66666667])
    """
    steps = np.asarray(num_steps, np.float64)
    return np.asarray(normalised(weights) @ steps / steps)


class FedNova(LocalSteps):
    """Unbalanced local steps of plain SGD whose updates are averaged per step.

    Parameters
    ----------
    strategy, fast_steps, **budget
        As for :class:`~flwr_hetero.strategy.LocalSteps`, but for ``step_correction``.

    Raises
    ------
    ValueError
        If a setting is out of range.

    References
    ----------
    Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
    Optimization", NeurIPS 2020.

    Examples
    --------
    >>> strategy = FedNova(fast_steps=32)
    """

    name: ClassVar[str] = "fednova"

    def __init__(
        self, strategy: Strategy | None = None, fast_steps: int = 32, **budget: Any
    ) -> None:
        super().__init__(strategy, fast_steps, step_correction=1.0, **budget)

    def scales(
        self, replies: list[Message], steps: NDArray[np.int64], weights: list[float]
    ) -> NDArray[np.float64]:
        """Return FedNova's scales: by the mean of the round's nodes, not of all seen."""
        return update_scales(steps, weights)

"""FedNova: average updates per step, so that unequal steps do not shift the objective."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.core.errors import invalid
from flwr_hetero.core.weighted_mean import normalised


def accumulated_steps(num_steps: ArrayLike, momentum: float = 0.0) -> NDArray[np.float64]:
    r"""Sum of the factors with which a node's gradients enter its update.

    .. math:: \|a_i\|_1 = \frac{1}{1 - \rho} \left(\tau_i - \rho \frac{1 - \rho^{\tau_i}}
        {1 - \rho}\right)

    Parameters
    ----------
    num_steps : array_like of int, shape (num_nodes,)
        Local steps tau_i, at least 1.
    momentum : float
        Momentum rho of the nodes' SGD in [0, 1), reset at the start of each round.

    Returns
    -------
    ndarray of float64, shape (num_nodes,)
        Equal to the steps without momentum.

    Raises
    ------
    ValueError
        If a count is below 1 or the momentum outside [0, 1).

    References
    ----------
    .. [1] Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous
       Federated Optimization", NeurIPS 2020, section 4.

    Examples
    --------
    >>> accumulated_steps([4, 1])
    array([4., 1.])
    >>> accumulated_steps([2], momentum=0.5)
    array([2.5])
    """
    steps = np.asarray(num_steps, dtype=np.float64)
    if not np.all(steps >= 1):
        raise invalid("num_steps", steps.tolist(), "be at least 1", "leave out idle nodes")
    if not 0 <= momentum < 1:
        raise invalid("momentum", momentum, "lie in [0, 1)", "use the nodes' SGD momentum")
    carried = momentum * (1 - momentum**steps) / (1 - momentum)
    return np.asarray((steps - carried) / (1 - momentum))


def update_scales(
    num_steps: ArrayLike, weights: ArrayLike, momentum: float = 0.0
) -> NDArray[np.float64]:
    r"""Factors that make an ordinary weighted mean FedNova's normalised one.

    .. math:: x_{t+1} - x_t = \tau_{eff} \sum_i p_i \frac{x_i - x_t}{\|a_i\|_1}
        = \sum_i p_i s_i (x_i - x_t), \qquad
        s_i = \frac{\sum_k p_k \|a_k\|_1}{\|a_i\|_1}

    Parameters
    ----------
    num_steps : array_like of int, shape (num_nodes,)
        Local steps tau_i, at least 1.
    weights : array_like of float, shape (num_nodes,)
        What the mean weights by, usually examples; p_i is its share.
    momentum : float
        Momentum of the nodes' SGD.

    Returns
    -------
    ndarray of float64, shape (num_nodes,)
        Scale s_i of each node's update; 1 for all where steps are equal.

    Notes
    -----
    Written as a scale per reply and not as a mean of its own, so that any strategy can follow:
    a server optimiser, a median, clipping.

    References
    ----------
    .. [1] Wang et al., NeurIPS 2020, Eq. 7 with the default tau_eff.

    Examples
    --------
    >>> update_scales([4, 2], weights=[1, 1])
    array([0.75, 1.5 ])
    """
    steps = accumulated_steps(num_steps, momentum)
    return np.asarray(normalised(weights) @ steps / steps)

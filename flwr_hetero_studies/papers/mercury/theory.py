"""What Mercury's analysis predicts: the speed-up of Eq. 5, the step size of section 4.4."""

from math import sqrt

from flwr_hetero.errors import check_count


def speedup(iterations_ratio: float, score_s: float, compute_s: float, network_s: float) -> float:
    r"""Predict what importance sampling gains over uniform sampling (Eq. 5).

    .. math:: \frac{1}{\frac{E_{is}}{E} \left(1 + \frac{T_{is}}{T_{cp} + T_{cm}}\right)}

    Iterations with over without it, E_is / E; seconds per iteration of scoring that nothing
    hides, of training, and of communication.

    >>> speedup(0.5, score_s=1.0, compute_s=1.0, network_s=3.0)
    1.6
    """
    return 1.0 / (iterations_ratio * (1.0 + score_s / (compute_s + network_s)))


def step_size(num_steps: int) -> float:
    r"""Return the constant step size for T steps, with which gradients vanish as the proof says.

    .. math:: \eta = 1 / \sqrt{T}

    Then :math:`\min_t E \|\nabla l\|^2 = O(1 / \sqrt{T})`, once eta < 2 / L for gradients of
    Lipschitz constant L.

    >>> step_size(400)
    0.05
    """
    return 1.0 / sqrt(check_count("num_steps", num_steps, 1))

"""AdaComm: fewer local steps as the loss falls, Mercury's rival in local SGD."""

from math import ceil, isfinite, sqrt

from flwr_hetero.core.errors import invalid


def adaptive_steps(
    loss: float, first_loss: float, previous_steps: int, first_steps: int, shrink: float = 0.5
) -> int:
    r"""Choose the local steps of the next interval.

    .. math:: \tau_l = \lceil \tau_0 \sqrt{F(x_l) / F(x_0)} \rceil, \quad
              \tau_l = \lceil \gamma \tau_{l-1} \rceil \text{ if that is not less}

    Parameters
    ----------
    loss : float
        Training loss F now.
    first_loss : float
        Training loss at the start, greater than 0.
    previous_steps : int
        Steps of the last interval.
    first_steps : int
        Steps of the first interval.
    shrink : float
        :math:`\gamma` in (0, 1): what happens to the steps when the loss stalls.

    Returns
    -------
    int
        At least 1; ``previous_steps`` if the loss is not a number.

    Raises
    ------
    ValueError
        If ``first_loss`` is not positive, steps are less than 1 or ``shrink`` not in (0, 1).

    References
    ----------
    .. [1] Wang and Joshi, "Adaptive Communication Strategies to Achieve the Best
       Error-Runtime Trade-off in Local-Update SGD", MLSys 2019, section 4.

    Examples
    --------
    >>> adaptive_steps(0.25, 1.0, previous_steps=16, first_steps=16)
    8
    >>> adaptive_steps(0.24, 1.0, previous_steps=8, first_steps=16)
    4
    """
    if not (isfinite(first_loss) and first_loss > 0.0):
        raise invalid("first_loss", first_loss, "be positive", "measure it on the first model")
    if min(previous_steps, first_steps) < 1:
        steps = (previous_steps, first_steps)
        raise invalid("steps", steps, "be at least 1", "start with a few")
    if not 0.0 < shrink < 1.0:
        raise invalid("shrink", shrink, "lie in (0, 1)", "0.5 halves them")
    if not isfinite(loss):
        return previous_steps
    by_loss = ceil(first_steps * sqrt(max(loss, 0.0) / first_loss))
    return max(1, by_loss if by_loss < previous_steps else ceil(shrink * previous_steps))

r"""What the theorems of CD-GraB set: the walk's constant, its bound, step sizes and rates.

Names are the paper's: m nodes with n units each and T epochs; ``smoothness`` is L of Assumption 3,
``deviation`` is :math:`\varsigma + \sigma` of Assumptions 1 and 2, ``start_gap`` is
:math:`F_1 = f(w_1) - \inf f`, ``failure`` is the probability :math:`\delta` with which a bound may
not hold. Vectors are at most of length 1. The constants are as published (arXiv:2302.00845v5);
the tests check only how the bounds depend on m, n and T.
"""

from math import exp, log, sqrt

from flwr_hetero.errors import check_count, check_number


def walk_constant(num_vectors: int, dim: int, failure: float) -> float:
    r"""Threshold c of the self-balancing walk (Alweiss, Liu and Sawhney, Theorem 1.1).

    .. math:: c = 30 \log(N d / \delta)

    >>> round(walk_constant(1000, 16, 0.01), 1)
    428.6
    """
    check_count("num_vectors", num_vectors, 1)
    check_count("dim", dim, 1)
    return 30 * log(num_vectors * dim / check_number("failure", failure, "(0, 1)"))


def balance_bound(num_vectors: int, dim: int, failure: float) -> float:
    r"""Bound of every signed prefix sum, in the largest coordinate (Theorem 1).

    .. math:: \tilde A = \sqrt{2 \log(4 d / \delta) \log(4 N / \delta)}

    >>> round(balance_bound(1000, 16, 0.01), 2)
    15.04
    """
    check_count("num_vectors", num_vectors, 1)
    check_count("dim", dim, 1)
    check_number("failure", failure, "(0, 1)")
    return sqrt(2 * log(4 * dim / failure) * log(4 * num_vectors / failure))


def step_size(
    num_nodes: int,
    num_units: int,
    epochs: int,
    *,
    smoothness: float,
    deviation: float,
    variance: float,
    start_gap: float,
    bound: float,
) -> float:
    r"""Step size for smooth functions (Theorem 2); variance is :math:`\sigma^2`, bound the A.

    .. math:: \alpha = \min \left\{ \frac{1}{16 L (2 n + \tilde A / m)}, \left(
              \frac{4 F_1 m^2}{42 L^2 (\varsigma + \sigma)^2 \tilde A^2 n T
              + 18 L^2 m^2 n^3 \sigma^2} \right)^{1/3} \right\}

    >>> given = dict(smoothness=1.0, deviation=1.0, variance=0.0, start_gap=1.0, bound=10.0)
    >>> [round(step_size(m, 8, 10**6, **given), 6) for m in (1, 8)]
    [0.000492, 0.001968]
    """
    m, n, epochs = _sizes(num_nodes, num_units, epochs)
    _check_positive(smoothness=smoothness, deviation=deviation, start_gap=start_gap, bound=bound)
    check_number("variance", variance, "[0, inf)")
    most = 1 / (16 * smoothness * (2 * n + bound / m))
    noise = 42 * (deviation * bound) ** 2 * n * epochs + 18 * m**2 * n**3 * variance
    return float(min(most, (4 * start_gap * m**2 / (smoothness**2 * noise)) ** (1 / 3)))


def step_size_pl(
    num_nodes: int,
    num_units: int,
    epochs: int,
    *,
    curvature: float,
    smoothness: float,
    deviation: float,
    variance: float,
    start_gap: float,
    bound: float,
) -> float:
    r"""Step size under the Polyak-Lojasiewicz condition, with mu the curvature (Theorem 3).

    .. math:: \alpha = \frac{2}{T n \mu} W_0(T^2 m^2 n^2 C), \qquad
              C = \frac{(F_1 + \sigma^2 / L) \mu^2}{224 L^2 (\varsigma + \sigma)^2 \tilde A^2}

    with :math:`W_0(x) e^{W_0(x)} = x`.

    >>> given = dict(curvature=1.0, smoothness=1.0, deviation=1.0, variance=0.0)
    >>> round(step_size_pl(4, 64, 100, start_gap=1.0, bound=10.0, **given), 5)
    0.00256
    """
    m, n, epochs = _sizes(num_nodes, num_units, epochs)
    _check_positive(curvature=curvature, smoothness=smoothness, deviation=deviation)
    _check_positive(start_gap=start_gap, bound=bound)
    gap = start_gap + check_number("variance", variance, "[0, inf)") / smoothness
    ratio = gap * curvature**2 / (224 * (smoothness * deviation * bound) ** 2)
    return 2 * lambert_w((epochs * m * n) ** 2 * ratio) / (epochs * n * curvature)


def rate(num_nodes: int, num_units: int, epochs: int, *, pl: bool = False) -> float:
    r"""How the bounds of Theorems 2 and 3 fall: linear in m what was linear in T before.

    .. math:: (m n T)^{-2/3} \quad\text{of the squared gradient}, \qquad
              (m n T)^{-2} \quad\text{of the loss, under P.L.}

    Constants, logarithms and the part :math:`1 / T` of Theorem 2, which m does not change, are
    left out.

    >>> [rate(4, 16, 4, pl=True) / rate(1, 16, 4, pl=True), round(rate(1, 16, 4), 4)]
    [0.0625, 0.0625]
    """
    m, n, epochs = _sizes(num_nodes, num_units, epochs)
    return float((m * n * epochs) ** (-2 if pl else -2 / 3))


def lambert_w(x: float) -> float:
    """Solve w e^w = x for x >= 0, by Newton's method.

    >>> w = lambert_w(10.0)
    >>> round(w * exp(w), 9)
    10.0
    """
    check_number("x", x, "[0, inf)")
    w = log(1 + x)
    for _ in range(50):
        w -= (w - x * exp(-w)) / (1 + w)
    return w


def _sizes(num_nodes: int, num_units: int, epochs: int) -> tuple[int, int, int]:
    given = {"num_nodes": num_nodes, "num_units": num_units, "epochs": epochs}
    m, n, t = (check_count(name, value, 1) for name, value in given.items())
    return m, n, t


def _check_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        check_number(name, value, "(0, inf)")

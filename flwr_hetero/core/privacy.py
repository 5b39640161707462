"""What a static tier policy does to privacy amplification by sampling (TiFL, section 4.6)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.core.errors import invalid


class SamplingRates(NamedTuple):
    """How likely a node is to train in a given round.

    Attributes
    ----------
    per_tier : ndarray of float64, shape (num_tiers,)
        Chance q_j of a node of tier j.
    q_max : float
        The largest q_j: the paper's figure for the whole system.
    q_known_tier : float
        The largest chance of a node once it is known which tier was drawn.
    q_vanilla : float
        The chance without tiers, |C| / |K|.

    Examples
    --------
    >>> isinstance(sampling_rates([0.5, 0.5], [10, 40], 5), SamplingRates)
    True
    """

    per_tier: NDArray[np.float64]
    q_max: float
    q_known_tier: float
    q_vanilla: float


def sampling_rates(
    tier_probs: ArrayLike, tier_sizes: ArrayLike, clients_per_round: int
) -> SamplingRates:
    r"""Compute the sampling rates of a static policy.

    .. math:: q_j = \frac{\theta_j}{n_{tiers}} \frac{|C|}{|n_j|}, \quad q_{max} = \max_j q_j

    Parameters
    ----------
    tier_probs : array_like of float, shape (num_tiers,)
        Chance of each tier, the paper's theta_j / n_tiers.
    tier_sizes : array_like of int, shape (num_tiers,)
        Nodes per tier, |n_j|.
    clients_per_round : int
        Nodes per round, |C|; a tier with fewer sends all of them.

    Returns
    -------
    SamplingRates
        Per tier, the two maxima, and vanilla's rate to compare with.

    Raises
    ------
    ValueError
        If the shapes differ, a tier is empty or nothing is drawn.

    Notes
    -----
    With local training that is (epsilon, delta)-private, the paper claims
    (O(q_max epsilon), q_max delta) per round. That needs the tier draw to stay hidden, from
    the model's update too. If the tier is known the nodes of the other tiers hide nothing
    and only the draw within the tier amplifies: then q is |C| / |n_j|, of the smallest tier
    in use. The argument is for fixed probabilities only; see :func:`privacy_report`.

    References
    ----------
    .. [1] Chai et al., "TiFL: A Tier-based Federated Learning System", HPDC 2020, section 4.6.

    Examples
    --------
    >>> rates = sampling_rates([0.7, 0.1, 0.1, 0.05, 0.05], [10] * 5, clients_per_round=5)
    >>> rates.q_max, rates.q_known_tier, rates.q_vanilla
    (0.35, 0.5, 0.1)
    """
    probs, sizes = np.asarray(tier_probs, np.float64), np.asarray(tier_sizes)
    if probs.ndim != 1 or probs.shape != sizes.shape or (sizes < 1).any():
        raise invalid("tier_sizes", sizes, "be one positive size per tier", "drop empty tiers")
    if clients_per_round < 1:
        raise invalid("clients_per_round", clients_per_round, "be at least 1", "pass |C|")
    within = np.minimum(clients_per_round / sizes, 1.0)
    per_tier = probs * within
    return SamplingRates(
        per_tier=per_tier,
        q_max=float(per_tier.max()),
        q_known_tier=float(within[probs > 0].max()),
        q_vanilla=float(min(clients_per_round / sizes.sum(), 1.0)),
    )


def privacy_report(rates: SamplingRates) -> str:
    """Say in words what the sampling rates of a static policy are worth.

    Parameters
    ----------
    rates : SamplingRates
        From :func:`sampling_rates`.

    Returns
    -------
    str
        A few lines: the rates and the two caveats.

    Examples
    --------
    >>> print(privacy_report(sampling_rates([1.0], [50], clients_per_round=5)))
    Privacy amplification by sampling (TiFL, section 4.6), static policy
      q_max = 0.1 (vanilla selection: 0.1)
      per round (epsilon, delta) becomes (O(0.1 epsilon), 0.1 delta)
    Caveats
      1. The draw of the tier must stay secret. Who knows the tier, or can tell it from the
         update, faces q = 0.1 and not q_max.
      2. This covers static policies only. The adaptive policy reads per-tier accuracies
         without noise, so nothing is claimed for it.
    """
    q, known = f"{rates.q_max:.4g}", f"{rates.q_known_tier:.4g}"
    return (
        "Privacy amplification by sampling (TiFL, section 4.6), static policy\n"
        f"  q_max = {q} (vanilla selection: {rates.q_vanilla:.4g})\n"
        f"  per round (epsilon, delta) becomes (O({q} epsilon), {q} delta)\n"
        "Caveats\n"
        "  1. The draw of the tier must stay secret. Who knows the tier, or can tell it from the\n"
        f"     update, faces q = {known} and not q_max.\n"
        "  2. This covers static policies only. The adaptive policy reads per-tier accuracies\n"
        "     without noise, so nothing is claimed for it."
    )

"""What sampling by tiers does for differential privacy (section 4.6), by a public accountant."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flwr_hetero.errors import check_count, check_number, install_hint, invalid
from flwr_hetero.tifl.algorithm import VANILLA, Floats, check_policy, policy_probs, sampling_rates

ORDERS = (*range(2, 65), 96, 128, 192, 256, 512, 1024)
"""Of Renyi's divergence, among which the accountant takes the best."""
LOW_ORDERS = tuple(1 + n / 20 for n in range(1, 20))
"""For large epsilons; a sampled Gaussian has no quick form at these."""


class TierPrivacy(NamedTuple):
    """A run's epsilon for one client's data, at the given delta."""

    epsilon: float
    """By the accountant, if nobody sees which tiers train."""
    epsilon_seen: float
    """If all do: of the worst tier's clients, in as many rounds as it trains in on average."""
    epsilon_all: float
    """If all clients trained in each round."""
    paper: float
    """The paper's O(q_max epsilon), q_max delta, with 1 as the constant that it leaves open."""
    rates: Floats
    """Probability with which a client of each tier is in a round: the paper's q_j."""


def tier_privacy(
    tier_sizes: Sequence[int],
    clients_per_round: int,
    *,
    rounds: int,
    noise_multiplier: float,
    delta: float,
    policy: str | Sequence[float] = "uniform",
) -> TierPrivacy:
    r"""Account for rounds whose sum of clipped updates has Gaussian noise.

    .. math:: q_j = P_j \, |C| / n_j, \qquad q_{max} = \max_j q_j

    ``epsilon`` takes each round as a Poisson sample of rate q_max, which holds for one client as
    long as tiers are secret. ``adaptive``, ``algorithm-2`` and ``paced`` draw by what nodes report
    without noise: nothing is claimed for them, and they are refused. Needs the extra ``privacy``.

    Parameters
    ----------
    tier_sizes : sequence of int
        Clients of each tier, from the fastest on.
    clients_per_round : int
        |C|; a smaller tier trains whole.
    rounds : int
        Rounds of the run.
    noise_multiplier : float
        Standard deviation of the noise, in bounds of an update's length: that of Flower's
        ``DifferentialPrivacyServerSideFixedClipping``.
    delta : float
        Probability in (0, 1) that epsilon is exceeded.
    policy : str or sequence of float
        A static policy of TiFL, or the tiers' probabilities.
    """
    sizes = [check_count("tier_sizes", size, 1) for size in tier_sizes]
    check_count("clients_per_round", clients_per_round, 1)
    check_count("rounds", rounds, 1)
    check_number("noise_multiplier", noise_multiplier, "(0, inf)")
    check_number("delta", delta, "(0, 1)")
    check_policy(policy, len(sizes))
    if policy == VANILLA and len(sizes) > 1:
        raise invalid("policy", policy, "have one tier", "give the sum of the tiers' clients")
    if policy in ("adaptive", "algorithm-2", "paced"):
        raise invalid("policy", policy, "be static", "tiers are drawn by reports without noise")
    probs = policy_probs(policy, len(sizes))
    rates = sampling_rates(probs, np.array(sizes), clients_per_round)
    within = np.divide(rates, probs, out=np.zeros_like(rates), where=probs > 0)
    # These are the tier's own rounds, at least one, and its draw of clients in them.
    seen = [
        epsilon_of(q, max(1, round(rounds * p)), noise_multiplier, delta)
        for q, p in zip(within.tolist(), probs.tolist(), strict=True)
        if p > 0
    ]
    largest = float(rates.max())
    return TierPrivacy(
        epsilon_of(largest, rounds, noise_multiplier, delta),
        max(seen),
        epsilon_of(1.0, rounds, noise_multiplier, delta),
        largest * epsilon_of(1.0, rounds, noise_multiplier, min(delta / largest, 0.999)),
        rates,
    )


def epsilon_of(rate: float, rounds: int, noise_multiplier: float, delta: float) -> float:
    """Return epsilon of so many Poisson samples with Gaussian noise, by Renyi's accountant."""
    try:
        import dp_accounting
        from dp_accounting.rdp import RdpAccountant
    except ModuleNotFoundError as error:
        hint = install_hint("privacy", "dp-accounting")
        raise ModuleNotFoundError(f"tier_privacy needs dp-accounting: {hint}") from error
    accountant = RdpAccountant(ORDERS if rate < 1 else (*LOW_ORDERS, *ORDERS))
    noisy = dp_accounting.GaussianDpEvent(noise_multiplier)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, noisy), rounds)
    return float(accountant.get_epsilon(delta))

import numpy as np
import pytest

from flwr_hetero.client.gate import Moments, observe, variance_ratio
from flwr_hetero.mercury.algorithm import inverse_probs, mixed_probs


@pytest.mark.parametrize("by_importance", [False, True])
def test_moments_agree_whichever_way_samples_were_drawn(by_importance: bool) -> None:
    rng = np.random.default_rng(0)
    norms = rng.exponential(size=500) ** 2
    cached = norms * rng.uniform(0.5, 2.0, size=500)
    probs = mixed_probs(cached, 0.5)
    exact = (norms**2).mean() / (norms**2 / (500 * probs)).mean()
    law = probs if by_importance else np.full(500, 1 / 500)
    drawn = rng.choice(500, size=200_000, p=law)
    weights = inverse_probs(law[drawn], 500)
    moments = observe(
        Moments(), norms[drawn], weights, inverse_probs(probs[drawn], 500), memory=1e9
    )
    assert exact > 1.5
    assert variance_ratio(moments) == pytest.approx(exact, rel=0.02)


def test_old_evidence_fades() -> None:
    ones = np.ones(100)
    moments = observe(Moments(), ones, ones, ones, memory=50.0)
    for _ in range(10):
        moments = observe(moments, ones, ones, ones / 2, memory=50.0)
    assert variance_ratio(moments) == pytest.approx(2.0, rel=1e-6)
    assert variance_ratio(Moments()) == 1.0

import numpy as np
import pytest

from flwr_hetero.client.gate import LARGEST, Moments, check_importance, observe, variance_ratio


@pytest.mark.parametrize("by_importance", [False, True])
def test_moments_agree_however_drawn(by_importance):
    rng = np.random.default_rng(0)
    norms = rng.exponential(size=500) ** 2
    cached = norms * rng.uniform(0.5, 2.0, size=500)
    probs = 0.5 * cached / cached.sum() + 0.5 / 500
    exact = (norms**2).mean() / (norms**2 / (500 * probs)).mean()
    law = probs if by_importance else np.full(500, 1 / 500)
    drawn = rng.choice(500, size=200_000, p=law)
    moments = observe(Moments(), norms[drawn], 1 / (500 * law[drawn]), 1 / (500 * probs[drawn]))
    assert exact > 1.5
    assert variance_ratio(moments) == pytest.approx(exact, rel=0.02)


def test_old_evidence_fades():
    ones = np.ones(2048)
    moments = observe(Moments(), ones, ones, ones)
    for _ in range(20):
        moments = observe(moments, ones, ones, ones / 2)
    assert variance_ratio(moments) == pytest.approx(2.0, rel=1e-6)
    assert moments.uniform == pytest.approx(2048 / (1 - np.exp(-1)), rel=1e-6)
    assert variance_ratio(Moments()) == 1.0


@pytest.mark.parametrize("bad", [-1e-9, np.nan, np.inf, LARGEST])
def test_unusable_importance_is_refused(bad):
    check_importance(np.array([0.0, LARGEST / 2]))
    check_importance(np.empty(0))
    with pytest.raises(ValueError, match="importance must be finite and not negative"):
        check_importance(np.array([1.0, bad]))

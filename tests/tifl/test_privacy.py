"""The accountant: rates of tiers, and its limits."""

import sys

import pytest

from flwr_hetero.tifl.privacy import epsilon_of, tier_privacy

RUN = {"rounds": 100, "noise_multiplier": 1.1, "delta": 1e-5}


@pytest.fixture(scope="module")
def accountant():
    return pytest.importorskip("dp_accounting")


def test_epsilon_lies_between_one_tier_and_all(accountant):
    random = tier_privacy([10] * 5, 5, policy="random", **RUN)
    assert random.rates.tolist() == pytest.approx([0.35, 0.05, 0.05, 0.025, 0.025])
    assert random.epsilon == epsilon_of(random.rates.max(), 100, 1.1, 1e-5)
    assert random.epsilon < random.epsilon_seen < random.epsilon_all
    # the fastest tier trains in 70 rounds, half of it in each
    assert random.epsilon_seen == epsilon_of(0.5, 70, 1.1, 1e-5)
    uniform = tier_privacy([10] * 5, 5, **RUN)
    assert uniform.epsilon < random.epsilon
    alone = tier_privacy([50], 50, **RUN)
    assert alone.epsilon == alone.epsilon_seen == alone.epsilon_all == alone.paper


def test_epsilon_without_sampling_is_that_of_gaussians(accountant):
    # Renyi's divergence of T Gaussians is T a / 2 z^2, and at best epsilon is at most this
    steps = 4 / (2 * 1.1**2)
    most = steps + 2 * (steps * 11.513) ** 0.5
    assert 0.8 * most < epsilon_of(1.0, 4, 1.1, 1e-5) <= 1.001 * most


def test_the_papers_bound_fails_where_a_round_leaks_much(accountant):
    few = tier_privacy([20] * 5, 1, rounds=1, noise_multiplier=0.4, delta=1e-5)
    assert few.epsilon > 2 * few.paper, "q epsilon is for a small epsilon"


WRONG = [({"policy": "adaptive"}, "policy must be static"), ({"rounds": 0}, "rounds must"),
         ({"policy": "unifrom"}, "policy must be one of"), ({"policy": "vanilla"}, "have one tier"),
         ({"policy": [1.0]}, "policy must have num_tiers=2"),
         ({"delta": 1.0}, "delta must"),
         ({"noise_multiplier": 0}, "noise_multiplier must")]  # fmt: skip


@pytest.mark.parametrize(("change", "text"), WRONG)
def test_what_cannot_be_accounted_is_refused(change, text):
    with pytest.raises(ValueError, match=text):
        tier_privacy([10, 10], 5, **(RUN | change))


def test_a_missing_accountant_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install dp-accounting, or .*\[privacy\]"):
        epsilon_of(0.5, 1, 1.0, 1e-5)

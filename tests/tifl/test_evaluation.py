import numpy as np
import pytest
from flwr.app import MetricRecord

from flwr_hetero.tifl.evaluation import accuracy_of, accuracy_per_tier
from flwr_hetero.tifl.tiers import Tiers


def make_tiers():
    """Three tiers of three nodes, and a dropout."""
    latency = {f"node-{i}": float(i + 1) for i in range(9)}
    tier = {name: i // 3 for i, name in enumerate(latency)}
    return Tiers(latency | {"node-9": 99.0}, tier, np.array([3.5, 6.5]))


def test_accuracy_is_weighted_by_examples():
    reported = {
        "node-0": MetricRecord({"acc": 0.5, "n": 30}),
        "node-1": MetricRecord({"acc": 0.9, "n": 10}),
        "node-8": MetricRecord({"acc": 0.2, "n": 10}),
        "node-9": MetricRecord({"acc": 1.0, "n": 10}),  # a dropout
    }
    accuracy = accuracy_per_tier(reported, make_tiers(), None, "n")
    np.testing.assert_allclose(accuracy, [0.6, np.nan, 0.2])


def test_missing_accuracy_is_logged(caplog):
    reported = {"node-0": MetricRecord({"f1": 0.5, "n": 30})}
    accuracy = accuracy_per_tier(reported, make_tiers(), None, "n")
    assert np.isnan(accuracy).all()
    assert "set accuracy_key to one of ['f1', 'n']" in caplog.text


@pytest.mark.parametrize(
    ("metrics", "key", "expected"),
    [
        ({"loss": 2.0, "eval-Acc": 0.5}, None, 0.5),
        ({"eval-loss": 2.0}, None, -2.0),
        ({"f1": 0.3, "acc": 0.5}, "f1", 0.3),
        ({"acc": 0.5}, "f1", np.nan),
        ({"f1": 0.3}, None, np.nan),
        ({"acc": float("inf")}, None, np.nan),
    ],
)
def test_accuracy_of(metrics, key, expected):
    assert accuracy_of(MetricRecord(metrics), key) == pytest.approx(expected, nan_ok=True)

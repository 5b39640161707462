"""FedAsync against a naive twin, and where it differs from FedBuff."""

import pytest
from quadratics import STEPS, Watched, fedavg, models

from flwr_hetero_studies.rivals import FedAsync

GOALS = [1.0, -2.0, 3.0, 0.5]
SPEEDS = [5.0, 3.17, 1.31, 0.713]  # no two replies come together
LR = 0.03


def naive(x, mixing, exponent, merges):
    """Mix models in the order in which nodes of known latencies answer (Algorithm 1)."""
    found, work = [x], [(STEPS / speed, node, x, 0) for node, speed in enumerate(SPEEDS)]
    for version in range(merges):
        at_s, node, start, began = min(work)
        work.remove((at_s, node, start, began))
        local = GOALS[node] + (1 - LR) ** STEPS * (start - GOALS[node])
        alpha = mixing * (1 + version - began) ** -exponent
        x = (1 - alpha) * x + alpha * local
        found.append(x)
        work.append((at_s + STEPS / SPEEDS[node], node, x, version + 1))
    return found


@pytest.mark.parametrize(
    ("settings", "exponent"),
    [({}, 0.5), ({"staleness": "none"}, 0.0), ({"mixing": 0.9, "staleness": 0.8}, 0.8)],
)
def test_equals_its_naive_twin(settings, exponent):
    strategy = FedAsync(fedavg(), **settings)
    strategy.update_limit = None
    found, _ = models(strategy, Watched(GOALS, SPEEDS, lr=LR), 25, x=0.3)
    assert found == pytest.approx(naive(0.3, settings.get("mixing", 0.6), exponent, 25), rel=1e-12)


def test_two_merges_by_hand():
    """Node 0 answers after 10 s, node 1 after 25 s from the same model, one merge old."""
    grid = Watched([1.0, 0.0], [1.0, 0.4], lr=0.5)
    found, _ = models(FedAsync(fedavg(), mixing=0.5), grid, 3, x=0.0)
    far = 1 - 0.5**STEPS  # of the way to the goal
    first = 0.5 * far
    second = 0.5 * first + 0.5 * (first + far * (1 - first))
    third = (1 - 0.5 / 3**0.5) * second + 0.5 / 3**0.5 * 0.0
    assert found == pytest.approx([0.0, first, second, third])

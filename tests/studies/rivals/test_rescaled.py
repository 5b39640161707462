"""Steps by the interval between two replies, by hand and against a naive twin."""

import numpy as np
import pytest
from quadratics import STEPS, Watched, fedavg, models
from recording import History

from flwr_hetero_studies.rivals import FedAsync, RescaledASGD

GOALS = [1.0, -2.0, 3.0, 0.5]
SPEEDS = [5.0, 3.17, 1.31, 0.713]  # no two replies come together
LR = 0.03


def naive(x, merges, server_rate=1.0, steps=STEPS):
    """Add updates as they come, scaled by time over the harmonic mean of all times seen so far."""
    found, seen = [x], {}
    work = [(steps / speed, node, x) for node, speed in enumerate(SPEEDS)]
    for _ in range(merges):
        at_s, node, start = min(work)
        work.remove((at_s, node, start))
        seen[node] = steps / SPEEDS[node]
        usual_s = len(seen) / sum(1 / time_s for time_s in seen.values())
        gradient = ((1 - LR) ** steps - 1) * (start - GOALS[node])
        x = x + server_rate * seen[node] / usual_s * gradient
        found.append(x)
        work.append((at_s + steps / SPEEDS[node], node, x))
    return found


@pytest.mark.parametrize(
    "settings", [{}, {"server_rate": 0.3}, {"num_steps": 3, "server_rate": 0.5}]
)
def test_equals_its_naive_twin(settings):
    strategy = RescaledASGD(fedavg(), **settings)
    strategy.update_limit = None
    found, _ = models(strategy, Watched(GOALS, SPEEDS, lr=LR), 25, x=0.3)
    rate, steps = settings.get("server_rate", 1.0), settings.get("num_steps", STEPS)
    assert found == pytest.approx(naive(0.3, 25, rate, steps), rel=1e-6)


def test_three_updates_by_hand():
    """Node 0 answers after 10 and 20 s, node 1 after 25 s: 10 and 25 s have a mean of 100 / 7."""
    strategy = RescaledASGD(fedavg(), server_rate=0.5)
    strategy.update_limit = None
    found, _ = models(strategy, Watched([1.0, -3.0], [1.0, 0.4], lr=0.5), 3, x=0.0)
    far = 1 - 0.5**STEPS  # of the way to the goal
    first = 0.5 * far * 1.0
    second = first + 0.5 * far * (1.0 - first)
    third = second + 0.5 * 25 / (100 / 7) * far * -3.0
    assert found == pytest.approx([0.0, first, second, third])


def test_reaches_the_mean_of_all_goals_where_fedasync_does_not():
    goals, speeds = [4.0, 0.0, 0.0, -2.0], [20.0, 1.9, 1.3, 1.0]
    ends = []
    for strategy in (RescaledASGD(fedavg(), server_rate=0.1), FedAsync(fedavg(), mixing=0.02)):
        strategy.update_limit = None
        found, _ = models(strategy, Watched(goals, speeds, lr=0.01), 800)
        ends.append(np.mean(found[-250:]))
    assert ends[0] == pytest.approx(np.mean(goals), abs=0.1)
    assert ends[1] > 2.0, "the quick node's goal is 4"


def test_nodes_that_wait_for_their_turn_count_alike_too():
    """Of eight nodes two are in flight: by their times alone slow ones would count far more."""
    speeds = [20.0, 15.0, 10.0, 8.0, 3.0, 2.0, 1.3, 1.0]
    history = History(RescaledASGD(fedavg(), concurrency=2))
    models(history, Watched([0.0] * 8, speeds, lr=0.01), 500, x=1.0)
    moved, by_time = np.zeros(8), np.zeros(8)
    for record in history.records[100:]:
        (name,), node = record["fedbuff"]["nodes"], int(record["fedbuff"]["nodes"][0][-1])
        assert name == f"node-{node}"
        moved[node] += record["fedbuff"]["step"]
        by_time[node] += 1 / speeds[node]
    assert moved / moved.mean() == pytest.approx(np.ones(8), abs=0.25)
    assert by_time.max() > 5 * by_time.min()

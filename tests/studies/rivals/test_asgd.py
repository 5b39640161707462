"""FedAsync, Rescaled ASGD and Ringleader ASGD against naive twins, and what they minimise."""

import numpy as np
import pytest
from quadratics import STEPS, Watched, fedavg, models

from flwr_hetero_studies.rivals import FedAsync, RescaledASGD, RingleaderASGD

GOALS = [1.0, -2.0, 3.0, 0.5]
SPEEDS = [5.0, 3.17, 1.31, 0.713]  # no two replies arrive together
LR = 0.03


class Arrivals:
    """Nodes of known latencies that are never idle: replies in order, with the model's version."""

    def __init__(self, x, steps=STEPS):
        self.steps = steps
        self.work = [(steps / speed, node, x, 0) for node, speed in enumerate(SPEEDS)]

    def next(self):
        """Return a node, its update, and the version of the model with which it started."""
        self.now_s, node, start, version = min(self.work)
        self.work.remove((self.now_s, node, start, version))
        return node, ((1 - LR) ** self.steps - 1) * (start - GOALS[node]), version, start

    def restart(self, node, x, version=0):
        self.work.append((self.now_s + self.steps / SPEEDS[node], node, x, version))


def fedasync(x, merges, mixing=0.6, exponent=0.5):
    """Mix models in the order of their arrival (Algorithm 1)."""
    arrivals = Arrivals(x)
    found = [x]
    for version in range(merges):
        node, update, began, start = arrivals.next()
        alpha = mixing * (1 + version - began) ** -exponent
        x = (1 - alpha) * x + alpha * (start + update)
        found.append(x)
        arrivals.restart(node, x, version + 1)
    return found


def rescaled(x, merges, num_steps=STEPS, server_rate=1.0):
    """Add updates, scaled by the node's time over the harmonic mean of all times so far."""
    arrivals = Arrivals(x, num_steps)
    found = [x]
    seen = {}
    for _ in range(merges):
        node, update, *_ = arrivals.next()
        seen[node] = num_steps / SPEEDS[node]
        usual_s = len(seen) / sum(1 / time_s for time_s in seen.values())
        x = x + server_rate * seen[node] / usual_s * update
        found.append(x)
        arrivals.restart(node, x)
    return found


def ringleader(x, merges, num_steps=STEPS, server_rate=1.0):
    """Follow the paper's two phases."""
    arrivals = Arrivals(x, num_steps)
    found = [x]
    following = [[] for _ in GOALS]

    def step(table):
        means = [sum(updates) / len(updates) for updates in table]
        return server_rate / len(table) * sum(means) / len(table)

    while len(found) <= merges:
        table = following
        following = [[] for _ in GOALS]
        while True:
            node, update, *_ = arrivals.next()
            table[node].append(update)
            if all(table):
                break
            arrivals.restart(node, x)
        x += step(table)
        found.append(x)
        arrivals.restart(node, x)
        left = set(range(len(GOALS))) - {node}
        while left:
            node, update, *_ = arrivals.next()
            if node in left:
                left.remove(node)
                table[node].append(update)
                x += step(table)
                found.append(x)
            else:
                following[node].append(update)
            arrivals.restart(node, x)
    return found[: merges + 1]


@pytest.mark.parametrize(
    ("strategy", "twin", "settings"),
    [
        (FedAsync, fedasync, {}),
        (FedAsync, fedasync, {"mixing": 0.9, "staleness": 0.8}),
        (RescaledASGD, rescaled, {}),
        (RescaledASGD, rescaled, {"num_steps": 3, "server_rate": 0.5}),
        (RingleaderASGD, ringleader, {}),
        (RingleaderASGD, ringleader, {"num_steps": 3, "server_rate": 0.5}),
    ],
)
def test_equals_its_naive_twin(strategy, twin, settings):
    made = strategy(fedavg(), **settings)
    made.update_limit = None
    found, _ = models(made, Watched(GOALS, SPEEDS, lr=LR), 25, x=0.3)
    given = {{"staleness": "exponent"}.get(name, name): v for name, v in settings.items()}
    assert found == pytest.approx(twin(0.3, 25, **given), rel=1e-6)


@pytest.mark.parametrize(
    ("strategy", "merges", "tolerance"),
    [(RescaledASGD(fedavg(), server_rate=0.2), 160, 0.2), (RingleaderASGD(fedavg()), 40, 0.05)],
    ids=["rescaled", "ringleader"],
)
def test_reaches_the_mean_of_all_goals(strategy, merges, tolerance):
    """The quick node's goal is 4, and FedAsync ends near it."""
    goals = [4.0, 0.0, 0.0, -2.0]
    strategy.update_limit = None
    found, _ = models(strategy, Watched(goals, [20.0, 1.9, 1.3, 1.0], lr=0.03), merges)
    assert np.mean(found[-merges // 4 :]) == pytest.approx(np.mean(goals), abs=tolerance)

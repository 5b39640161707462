"""FedAsync, Rescaled ASGD and Ringleader ASGD against naive twins, and what they minimise."""

import numpy as np
import pytest
from quadratics import STEPS, Watched, fedavg, models
from recording import History

from flwr_hetero.fleet import Fault
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
    [(RescaledASGD(fedavg(), server_rate=0.2), 240, 0.2), (RingleaderASGD(fedavg()), 40, 0.05)],
    ids=["rescaled", "ringleader"],
)
def test_reaches_the_mean_of_all_goals(strategy, merges, tolerance):
    """The quick node's goal is 4, and FedAsync ends near it."""
    goals = [4.0, 0.0, 0.0, -2.0]
    strategy.update_limit = None
    found, _ = models(strategy, Watched(goals, [20.0, 1.9, 1.3, 1.0], lr=0.03), merges)
    assert np.mean(found[-merges // 4 :]) == pytest.approx(np.mean(goals), abs=tolerance)


def test_nodes_of_rescaled_asgd_that_wait_for_their_turn_have_equal_weights():
    """Of eight nodes two are in flight: by their times alone slow ones would count far more."""
    speeds = [20.0, 15.0, 10.0, 8.0, 3.0, 2.0, 1.3, 1.0]
    history = History(RescaledASGD(fedavg(), concurrency=2))
    models(history, Watched([0.0] * 8, speeds, lr=0.01), 160, x=1.0)
    moved = np.zeros(8)
    by_time = np.zeros(8)
    for record in history.records[60:]:
        (name,) = record["fedbuff"]["nodes"]
        node = int(name.removeprefix("node-"))
        moved[node] += record["fedbuff"]["step"]
        by_time[node] += 1 / speeds[node]
    assert moved / moved.mean() == pytest.approx(np.ones(8), abs=0.4)
    assert by_time.max() > 5 * by_time.min()


def test_ringleader_first_asks_those_that_it_waits_for():
    """With two of five nodes at a time a round of one update each is short."""
    grid = Watched([1.0] * 5, [4.0, 2.9, 2.3, 1.7, 1.1], lr=0.01)
    history = History(RingleaderASGD(fedavg(), concurrency=2, seed=3))
    models(history, grid, 20)
    assert grid.most == 2
    records = [record["fedbuff"]["nodes"] for record in history.records[1:]]
    names = [f"node-{i}" for i in range(5)]
    for first in range(0, 20, 5):
        last_of_first_phase = records[first][-1]
        made_steps = [last_of_first_phase, *(nodes[0] for nodes in records[first + 1 : first + 5])]
        assert {*records[first]} == {*names}
        assert sorted(made_steps) == names, "one step for each node"
    sent = [node for _, node, kind, _ in grid.sent if kind == "train"]
    assert sorted(sent[:5]) == [0, 1, 2, 3, 4], "nobody twice before everybody once"


def test_ringleader_does_not_wait_for_a_node_that_dies():
    class Dies(Watched):
        def push_messages(self, messages):
            self.at_work = {}
            return super().push_messages(messages)

    history = History(RingleaderASGD(fedavg()))
    grid = Dies([1.0] * 3, [3.0, 2.3, 1.1], lr=0.01, faults=[Fault(2, "dies", first_round=6)])
    models(history, grid, 30, timeout=60.0)
    assert any(record["failures"] for record in history.records[1:])
    last = [node for record in history.records[-9:] for node in record["fedbuff"]["nodes"]]
    assert {*last} == {"node-0", "node-1"}

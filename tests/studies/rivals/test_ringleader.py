"""The table by hand, against a naive twin, and the objective that unequal speeds do not bend."""

import numpy as np
import pytest
from quadratics import STEPS, Watched, fedavg, models
from recording import History

from flwr_hetero.fleet import Fault
from flwr_hetero_studies.rivals import FedAsync, RingleaderASGD
from flwr_hetero_studies.rivals.ringleader import GradientTable

GOALS = [1.0, -2.0, 3.0, 0.5]
SPEEDS = [5.0, 3.17, 1.31, 0.713]  # no two replies come together
LR = 0.03


def naive(x, merges, server_rate=1.0, steps=STEPS):
    """Follow the paper's two phases, with nodes of known latencies that are never idle."""
    n, found = len(GOALS), [x]
    work = [(steps / speed, node, x) for node, speed in enumerate(SPEEDS)]

    def arrival():
        nonlocal work
        at_s, node, start = min(work)
        work = [job for job in work if job[1] != node]
        return at_s, node, ((1 - LR) ** steps - 1) * (start - GOALS[node])

    def step(table):
        means = [sum(own) / len(own) for own in table]
        return server_rate / n * sum(means) / n

    following = [[] for _ in GOALS]
    while True:
        table, following = following, [[] for _ in GOALS]
        while True:
            at_s, node, gradient = arrival()
            table[node].append(gradient)
            if all(table):
                break
            work.append((at_s + steps / SPEEDS[node], node, x))
        x += step(table)
        found.append(x)
        work.append((at_s + steps / SPEEDS[node], node, x))
        left = set(range(n)) - {node}
        while left:
            at_s, node, gradient = arrival()
            if node in left:
                left.remove(node)
                table[node].append(gradient)
                x += step(table)
                found.append(x)
            else:
                following[node].append(gradient)
            work.append((at_s + steps / SPEEDS[node], node, x))
        if len(found) > merges:
            return found[: merges + 1]


@pytest.mark.parametrize(
    "settings", [{}, {"server_rate": 2.5}, {"num_steps": 3, "server_rate": 0.5}]
)
def test_equals_its_naive_twin(settings):
    strategy = RingleaderASGD(fedavg(), **settings)
    strategy.update_limit = None
    found, _ = models(strategy, Watched(GOALS, SPEEDS, lr=LR), 25, x=0.3)
    rate, steps = settings.get("server_rate", 1.0), settings.get("num_steps", STEPS)
    assert found == pytest.approx(naive(0.3, 25, rate, steps), rel=1e-12)


def test_first_round_by_hand():
    """Node 0 answers after 10, 20 and 30 s, node 1 after 25 and 50 s.

    Node 0's third update is the first of the second phase, its fourth is the next round's.
    """
    grid = Watched([1.0, -3.0], [1.0, 0.4], lr=0.5)
    found, _ = models(RingleaderASGD(fedavg()), grid, 2, x=0.0)
    far = 1 - 0.5**STEPS  # of the way to the goal
    first = (far * 1.0 + far * -3.0) / 2 / 2
    # all of node 0's started from 0, for it began the third one before the first step
    second = first + (far * 1.0 + far * -3.0) / 2 / 2
    assert found == pytest.approx([0.0, first, second])


def test_table_takes_the_mean_within_workers_first():
    table = GradientTable()
    for node, value in ((0, 1.0), (0, 2.0), (0, 6.0), (1, 5.0)):
        table.add(node, {"w": np.array([value, 0.0])})
    assert table.mean()["w"] == pytest.approx([4.0, 0.0])
    table.add(1, {"w": np.array([7.0, 2.0])})
    assert table.mean()["w"] == pytest.approx([4.5, 0.5])


def test_reaches_the_mean_of_all_goals_where_fedasync_does_not():
    goals, speeds = [4.0, 0.0, 0.0, -2.0], [20.0, 1.9, 1.3, 1.0]
    ends = []
    for strategy in (RingleaderASGD(fedavg()), FedAsync(fedavg(), mixing=0.1)):
        strategy.update_limit = None
        found, _ = models(strategy, Watched(goals, speeds, lr=0.03), 120)
        ends.append(np.mean(found[-20:]))
    assert ends[0] == pytest.approx(np.mean(goals), abs=0.02)
    assert ends[1] > 2.0, "the quick node's goal is 4"


def test_those_are_asked_first_who_are_waited_for():
    """With two of five nodes at a time a round of one update each is soon over."""
    grid = Watched([1.0] * 5, [4.0, 2.9, 2.3, 1.7, 1.1], lr=0.01)
    history = History(RingleaderASGD(fedavg(), concurrency=2, seed=3))
    models(history, grid, 30)
    assert grid.most == 2
    records = [record["fedbuff"]["nodes"] for record in history.records[1:]]
    for first in range(0, 30, 5):
        last_of_first_phase = records[first][-1]
        made_steps = [last_of_first_phase, *(nodes[0] for nodes in records[first + 1 : first + 5])]
        assert {*records[first]} == {f"node-{i}" for i in range(5)}
        assert sorted(made_steps) == [f"node-{i}" for i in range(5)], "one step for each node"
    sent = [node for _, node, kind, _ in grid.sent if kind == "train"]
    assert sorted(sent[:5]) == [0, 1, 2, 3, 4], "nobody twice before everybody once"


def test_a_node_that_dies_is_not_waited_for():
    class Dies(Watched):
        def push_messages(self, messages):
            self.at_work = {}
            return super().push_messages(messages)

    history = History(RingleaderASGD(fedavg()))
    grid = Dies([1.0] * 3, [3.0, 2.3, 1.1], lr=0.01, faults=[Fault(2, "dies", first_round=6)])
    models(history, grid, 40, timeout=60.0)
    assert any(record["failures"] for record in history.records[1:])
    last = [node for record in history.records[-9:] for node in record["fedbuff"]["nodes"]]
    assert {*last} == {"node-0", "node-1"}

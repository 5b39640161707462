"""Groups that arrive together: the rule of steps by hand, and on the virtual clock."""

import numpy as np
import pytest
from quadratics import Watched, fedavg, models
from recording import History

from flwr_hetero_studies.rivals import FedCompass
from flwr_hetero_studies.rivals.fedcompass import ArrivalGroup as Group
from flwr_hetero_studies.rivals.fedcompass import assign

SPEEDS = [4.0, 3.1, 2.3, 1.7, 1.1, 1.0]


def run(merges, speeds=SPEEDS, strategy=None, timeout=600.0, make=Watched, **settings):
    history = History(strategy or FedCompass(fedavg(), 5, 25))
    grid = make([1.0] * len(speeds), speeds, lr=0.01, **settings)
    models(history, grid, merges, timeout=timeout)
    return [record | record["fedbuff"] for record in history.records[1:]], grid


@pytest.mark.parametrize(
    ("groups", "steps", "expected_s"),
    [
        ([], 20, 60.0),  # none to join: as many as may be
        ([Group(40.0, 44.0, 1.0)], 10, 40.0),  # (40 - 20) / 2
        ([Group(40.0, 44.0, 1.0), Group(52.0, 60.0, 1.0)], 16, 52.0),  # the one of most steps
        # too late for the one expected at 26: back when its quickest may be, at 27 + 20 * 0.5
        ([Group(26.0, 27.0, 0.5)], 8, 36.0),
        # not even that leaves 5 steps
        ([Group(21.0, 22.0, 0.1)], 5, 30.0),
        # too early for a group that needs 30 steps, which could be back after 60
        ([Group(80.0, 90.0, 2.0)], 20, 60.0),
        ([Group()], 20, 60.0),  # nothing is expected of nodes that were never measured
    ],
)
def test_steps_by_hand(groups, steps, expected_s):
    """At 20 s, a node of 2 s a step that takes 5 to 20 of them."""
    found, group = assign(20.0, 2.0, groups, 5, 20)
    assert (found, group.expected_s) == (steps, expected_s)
    if group not in groups:
        assert group.latest_s == pytest.approx(20.0 + 1.2 * (expected_s - 20.0))


def test_nodes_soon_arrive_together():
    """The paper's claim: no node waits for a slower one, and staleness falls to 0 or 1."""
    records, grid = run(30)
    assert [len(record["nodes"]) for record in records[:6]] == [1] * 6  # they are measured
    for record in records[15:]:
        assert len(record["nodes"]) == 6
        assert max(record["staleness"]) == 0
        arrived = [at_s for at_s, _ in grid.received if at_s <= record["virtual_s"] + 1e-9][-6:]
        assert max(arrived) - min(arrived) < 1 / min(SPEEDS)  # less than a step of the slowest
    steps = np.array([records[-1]["num_steps"][f"node-{i}"] for i in range(6)])
    assert steps / steps.max() == pytest.approx(np.array(SPEEDS) / 4, abs=1 / 25)
    assert set(steps) <= set(range(5, 26))

import numpy as np
import pytest
from quadratics import fedavg
from recording import History
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero_studies.rivals import Oort
from flwr_hetero_studies.rivals.oort import scores


def run(strategy, speeds, rounds):
    """Run on toy nodes, whose loss grows with their number; return the records."""
    history = History(strategy)
    history.start(LocalGrid(toy_app(), [DeviceProfile(s) for s in speeds]), toy_arrays(), rounds)
    return history.records[1:]


def test_scores_by_hand():
    """The clip is at 29: 0, 10/19 and 1; sqrt(0.1 ln 4 / L) is 0.3723, 0.2633, 0.2150."""
    found = scores([10, 20, 30], [1, 4, np.nan], [1, 2, 3], 4, preferred_s=2.0, penalty=2.0)
    assert found == pytest.approx([0.3723, (10 / 19 + 0.2633) / 4, 1.2150], abs=1e-4)


def test_losses_and_latencies_steer_the_selection():
    """Of eight nodes the four with the largest losses: not the slowest, which is one of them."""
    speeds = [4, 4.1, 4.2, 4.3, 4, 4.1, 0.1, 4.2]
    nodes = [r["selected"] for r in run(Oort(fedavg(), 3, pace=0.8), speeds, 60)[20:]]
    often = {f"node-{i}": sum(f"node-{i}" in some for some in nodes) for i in range(8)}
    assert often["node-7"] == max(often.values()) > 15
    assert often["node-6"] < 0.5 * often["node-5"]
    unpenalised = run(Oort(fedavg(), 3, pace=0.8, penalty=0.0), speeds, 60)[20:]
    assert sum("node-6" in r["selected"] for r in unpenalised) > 2 * often["node-6"]

import numpy as np
import pytest
from quadratics import fedavg
from recording import History
from toy import toy_app, toy_arrays

from flwr_hetero.exchange.context import Exchange
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.server.selection import Outcome
from flwr_hetero_studies.rivals import Oort
from flwr_hetero_studies.rivals.oort import WINDOW, scores


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


@pytest.mark.parametrize(("last", "pace"), [(1.0, 0.35), (2.0, 0.3), (3.0, 0.3)])
def test_pacer_relaxes_when_less_is_gained(last, pace):
    strategy = Oort(fedavg(), 2)
    for number in range(1, 2 * WINDOW + 1):
        loss = 2.0 if number <= WINDOW else last
        outcome = Outcome(1.0, {"num-examples": 10, "train-loss": loss})
        strategy.on_outcome(Exchange(strategy.fleet, number), {"node-0": outcome}, [])
        assert strategy.quantile == (pace if number == 2 * WINDOW else 0.3)
    assert strategy.gains == [20.0] * WINDOW + [10.0 * last] * WINDOW


def test_utility_is_of_squared_losses_where_they_are_reported():
    strategy = Oort(fedavg())
    squares = {"num-examples": 8, "train-loss": 1.0, "loss-rms": 1.5}
    strategy.on_outcome(
        Exchange(strategy.fleet, 3),
        {"a": Outcome(2.0, squares), "b": Outcome(2.0, {"num-examples": 8})},
        [],
    )
    assert strategy.known == {"a": (12.0, 2.0, 3), "b": (0.0, 2.0, 3)}

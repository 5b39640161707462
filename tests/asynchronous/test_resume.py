"""A run that is killed and resumed: what is exact, and what is not."""

import random

import numpy as np
import pytest
from quadratics import Watched, fedavg, start
from recording import Folder, KilledError

from flwr_hetero.strategy import FedBuff, LocalSteps, Recorded

GOALS = [0.0, 1.0, 2.0, 3.0]
SPEEDS = [1.0, 0.7, 0.53, 0.31]


def go(folder, updates, *, killed_in=None, resume=False, build=None):
    strategy = build() if build else FedBuff(fedavg(), concurrency=3, seed=4)
    whole = Recorded(strategy, run_dir=folder, resume=resume)
    found = {}

    def watch(number, arrays):
        if number == killed_in:
            raise KilledError
        found[number] = float(arrays["x"].numpy()[0])

    random.seed(1)
    whole.start(Watched(GOALS, SPEEDS, lr=0.01), start(), updates, evaluate_fn=watch)
    return found, strategy


@pytest.mark.parametrize(
    "build", [None, lambda: FedBuff(LocalSteps(fedavg(), 10, budget="deadline"))]
)
def test_no_server_update_is_lost(tmp_path, build):
    folder = Folder(tmp_path / "run")
    with pytest.raises(KilledError):
        go(folder, 30, killed_in=13, build=build)
    before = [dict(record) for record in folder.records]
    after, strategy = go(folder, 30, resume=True, build=build)
    assert [record["round"] for record in folder.records] == list(range(31))
    assert folder.records[:13] == before  # lines of updates made stay as they are
    assert sorted(after) == list(range(13, 31))
    times = [record["virtual_s"] for record in folder.records]
    assert times == sorted(times)
    # what was in flight is asked again with the newest model: nothing is stale at first
    assert set(folder.records[13]["fedbuff"]["staleness"]) == {0}
    assert all(means.count for means in strategy.rates.means.values())


def test_a_resume_when_no_node_is_in_flight_is_exact(tmp_path):

    def build():
        return FedBuff(fedavg(), concurrency=1, buffer_size=1, seed=4)

    whole, _ = go(Folder(tmp_path / "whole"), 20, build=build)
    folder = Folder(tmp_path / "broken")
    with pytest.raises(KilledError):
        go(folder, 20, killed_in=8, build=build)
    rest, _ = go(folder, 20, resume=True, build=build)
    assert [rest[n] for n in range(8, 21)] == pytest.approx([whole[n] for n in range(8, 21)])
    assert np.isfinite(list(rest.values())).all()

"""The driver: what its note is shown of a run."""

import pytest
from flwr.serverapp.strategy import FedAvg

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import FedBuff, ModelAverage, RandomSelection
from flwr_hetero_studies.core.emulate import Enough, drive
from flwr_hetero_studies.cost.scale import EchoFleet


def moments(strategy, until, **how):
    seen, grid = [], LocalGrid(EchoFleet().app, [DeviceProfile()] * 4, seed=0)

    def note(moment):
        if how.get("updates"):
            moment.watch.count_until(moment.virtual_s)
        seen.append(moment._replace(record=(moment.watch.bytes, moment.watch.device_s)))
        if len(seen) == until:
            raise Enough

    drive(strategy, grid, EchoFleet.first(), note, seed=0, rounds=6, **how)
    return seen


def fedavg():
    return RandomSelection(FedAvg(fraction_evaluate=0.0), 2, seed=0)


def test_note_sees_rounds_or_updates_until_enough():
    rounds, updates = moments(fedavg(), 5), moments(fedavg(), 4, updates=True)
    assert [moment.round for moment in rounds] == [0, 1, 2, 3, 4]
    assert [moment.round for moment in updates] == [1, 2, 3, 4]
    for one, other in zip(rounds[1:], updates, strict=True):  # costs are counted once
        assert one.record == pytest.approx(other.record)
        assert one.virtual_s == other.virtual_s
        assert (one.arrays["w"].numpy() == other.arrays["w"].numpy()).all()
    assert len(moments(fedavg(), 100)) == 7, "after its last round"


def test_average_is_that_of_the_strategy_if_it_has_one():
    buffered = ModelAverage(FedBuff(FedAvg(fraction_evaluate=0.0), buffer_size=2, seed=0))
    last = moments(buffered, 5)[-1]
    expected = buffered.averaged(last.arrays)["w"].numpy()
    assert (last.averaged["w"].numpy() == expected).all()
    plain = moments(fedavg(), 3)[-1]
    assert plain.averaged is plain.arrays

"""Through how many files of flwr_hetero the server's part of a round runs.

Files count if their functions are called during one round, or one server update, on a LocalGrid.
The grid and the nodes do not count. The limits are to fall, and never to grow.
"""

import sys
from pathlib import Path

import pytest
from flwr.serverapp.strategy import FedAvg

import flwr_hetero
from flwr_hetero.fleet import LocalGrid, named_fleet
from flwr_hetero.strategy import BiasedLocalSGD, CDGraB, FedSlice, TiFL
from flwr_hetero_studies.core.emulate import Enough, drive
from flwr_hetero_studies.core.quiet import only_errors
from flwr_hetero_studies.cost.scale import EchoFleet

ROOT = str(Path(flwr_hetero.__file__).parent) + "/"
# The round and the server update that count are late enough to do nothing for the first time.
ROUND = 4
UPDATE = 10
JOURNEYS = {
    "a round of TiFL(BiasedLocalSGD(CDGraB(FedAvg)))": (
        lambda: TiFL(BiasedLocalSGD(CDGraB(fedavg()), fast_steps=8), 4), False, 17),
    "a server update of FedSlice": (lambda: FedSlice(fedavg()), True, 15),
    "a round of TiFL": (lambda: TiFL(fedavg(), 4), False, 12),
}  # fmt: skip


def fedavg():
    return FedAvg(fraction_evaluate=0.0)


def visited(strategy, updates):
    files = set()
    inside = seen = 0

    def profile(frame, event, _):
        nonlocal inside
        name = frame.f_code.co_filename
        if inside or (name.startswith(ROOT + "fleet/") and event == "call"):
            inside += (event == "call") - (event == "return")
        elif event == "call" and name.startswith(ROOT):
            files.add(name.removeprefix(ROOT))

    def note(moment):
        nonlocal seen
        seen += 1
        at = seen if updates else moment.round
        last = UPDATE if updates else ROUND
        # The profiler is switched off before anything else is called.
        sys.setprofile(profile if at == last - 1 else None)
        if at == last:
            raise Enough

    with only_errors():
        grid = LocalGrid(EchoFleet().app, named_fleet("paper-5", 20))
        drive(strategy, grid, EchoFleet.first(), note, seed=0, updates=updates)
    return files


@pytest.mark.parametrize("journey", JOURNEYS)
def test_a_round_runs_through_few_files(journey):
    make, updates, limit = JOURNEYS[journey]
    files = visited(make(), updates)
    assert not [name for name in files if name.startswith(("fleet/", "client/"))]
    assert 5 < len(files) <= limit, sorted(files)

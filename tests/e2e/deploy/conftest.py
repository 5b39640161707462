"""Real fleets for tests: in a folder of their own, on the loopback interface, always ended."""

import pytest

from flwr_hetero.fleet import RealFleet, named_fleet, processes
from flwr_hetero_studies.faults.fleet_run import TOY_APP
from flwr_hetero_studies.faults.scenarios import QUICK, own_fleet


@pytest.fixture
def toy_app():
    """Give the app that the scenarios use too."""
    return TOY_APP


@pytest.fixture(scope="module")
def small_fleet(tmp_path_factory):
    """Two SuperNodes; the second has half a CPU behind a slow link."""
    folder = tmp_path_factory.mktemp("small") / "fleet"
    devices = folder.with_name("devices.toml")
    devices.write_text(
        "[[device]]\ncompute-factor = 2.0\n\n"
        "[[device]]\ncompute-factor = 1.0\nuplink-mbps = 20.0\ndownlink-mbps = 20.0\n"
    )
    fleet = RealFleet(folder, QUICK)
    fleet.up(named_fleet(str(devices), 2))
    yield fleet
    fleet.down(keep=True)
    assert processes.find(folder) == []


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """Four equal SuperNodes and a SuperLink with a database."""
    with own_fleet(tmp_path_factory.mktemp("four")) as fleet:
        yield fleet
    assert processes.find(fleet.folder) == []

"""Real fleets for tests: in a folder of their own, on the loopback interface, always ended."""

import pytest

from flwr_hetero.fleet import DeviceProfile, processes
from flwr_hetero_studies.faults.scenarios import QUICK, own_fleet
from flwr_hetero_studies.real.throttle import ThrottledFleet


@pytest.fixture(scope="module")
def small_fleet(tmp_path_factory):
    """Two SuperNodes; the second has half a CPU behind a slow link."""
    profiles = [DeviceProfile(2.0), DeviceProfile(1.0, 20.0, 20.0)]
    fleet = ThrottledFleet(tmp_path_factory.mktemp("small") / "fleet", profiles, QUICK)
    fleet.start()
    yield fleet
    fleet.down(keep=True)
    assert processes.find(fleet.folder) == []


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """Four equal SuperNodes and a SuperLink with a database."""
    with own_fleet(tmp_path_factory.mktemp("four")) as fleet:
        yield fleet
    assert processes.find(fleet.folder) == []

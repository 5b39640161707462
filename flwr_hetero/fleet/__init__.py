"""Emulated fleets on a virtual clock, and a real one of Flower processes on this machine."""

from flwr_hetero.client.device import DeviceProfile, named_fleet
from flwr_hetero.fleet.faults import Fault
from flwr_hetero.fleet.local_grid import LocalGrid
from flwr_hetero.fleet.real_fleet import RealFleet

__all__ = ["DeviceProfile", "Fault", "LocalGrid", "RealFleet", "named_fleet"]

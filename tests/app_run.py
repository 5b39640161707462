"""The app of a study on emulated nodes in this process, without its ServerApp."""

import importlib
import random
import sys
from pathlib import Path

from recording import History

from flwr_hetero.fleet import LocalGrid, named_fleet
from flwr_hetero_studies.papers.mercury import app as mercury
from flwr_hetero_studies.tasks.run import central_evaluate, initial_arrays

FLEET_APP = Path(__file__).parents[1] / "apps" / "fleet"


def fleet_module(name):
    """Import a module of the fleet app."""
    if (folder := str(FLEET_APP)) not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(f"fleet_app.{name}")


def settings_of(name):
    """Return the class of an app's settings."""
    return fleet_module("task").FleetSettings if name == "fleet" else mercury.MercurySettings


class AppRun:
    """May go on after a test interfered with it; profiles, or so many nodes of its fleet."""

    def __init__(self, name, profiles, **settings):
        self.settings = settings_of(name)(**settings)
        if isinstance(profiles, int):
            profiles = named_fleet(self.settings.fleet, profiles)
        config = {key.replace("_", "-"): value for key, value in vars(self.settings).items()}
        client = fleet_module("client_app").app if name == "fleet" else mercury.app
        self.grid = LocalGrid(client, profiles, run_config=config)
        of_fleet = (len(profiles),) if name == "fleet" else ()
        self.history = History(self.settings.strategy(*of_fleet))
        self.arrays = initial_arrays(self.settings)
        random.seed(self.settings.seed)

    def go_on(self, num_rounds):
        """Train for some rounds in which no reply is dropped; return their records."""
        self.history.records.clear()
        result = self.history.start(self.grid, self.arrays, num_rounds)
        self.arrays = result.arrays
        assert not failures(self.history.records)
        return self.history.records[1:]

    def evaluate(self):
        return central_evaluate(self.settings)(0, self.arrays)

    def loss_ratio(self, num_rounds):
        """Train for some rounds; return what is left of the loss."""
        before = self.evaluate()["loss"]
        self.go_on(num_rounds)
        return self.evaluate()["loss"] / before

    def state(self, node=1000):
        return self.grid.context(node).state


def failures(records):
    return [failure for record in records for failure in record["failures"]]

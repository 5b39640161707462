"""An app on emulated nodes in this process, without its ServerApp."""

from flwr.app import ConfigRecord
from recording import History

from flwr_hetero import keys
from flwr_hetero.fleet import LocalGrid
from flwr_hetero_studies.tasks.run import central_evaluate, initial_arrays


class AppRun:
    """May go on after a test interfered with it."""

    def __init__(self, app, settings, profiles):
        self.settings = settings
        config = {key.replace("_", "-"): value for key, value in vars(settings).items()}
        self.grid = LocalGrid(app, profiles, run_config=config)
        self.history = History(settings.strategy())
        self.arrays = initial_arrays(settings)

    def go_on(self, num_rounds):
        """Train for some rounds; return their records."""
        self.history.records.clear()
        steps = {keys.NUM_STEPS: num} if (num := self.settings.local_steps) else {}
        result = self.history.start(
            self.grid, self.arrays, num_rounds, train_config=ConfigRecord(steps)
        )
        self.arrays = result.arrays
        return self.history.records[1:]

    def loss(self):
        return central_evaluate(self.settings)(0, self.arrays)["loss"]

    def loss_ratio(self, num_rounds):
        """Train for some rounds in which no node fails; return what is left of the loss."""
        before = self.loss()
        assert not failures(self.go_on(num_rounds))
        return self.loss() / before

    def state(self, node=1000):
        return self.grid.context(node).state


def failures(records):
    return [failure for record in records for failure in record["failures"]]

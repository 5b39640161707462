"""What the tests of TiFL on a fleet share."""

from flwr.app import Error, Message
from flwr.serverapp.strategy import FedAvg
from recording import History
from toy import toy_app, toy_arrays

from flwr_hetero import keys
from flwr_hetero._flwr import NODE_UNAVAILABLE
from flwr_hetero.fleet import DeviceProfile, LocalGrid, named_fleet
from flwr_hetero.strategy import TiFL

PROFILE = keys.PROFILE_MESSAGE


def make_tifl(inner=None, **settings):
    """Two tiers, two nodes a round, uniform."""
    defaults = {"clients_per_round": 2, "num_tiers": 2, "policy": "uniform"}
    return TiFL(inner or FedAvg(fraction_evaluate=0.0), **(defaults | settings))


def paper_grid(num_nodes=20, app=None, **settings):
    """Five equal groups of nodes that train 100 examples in 0.25, 0.5, 1, 2 and 10 s."""
    return LocalGrid(app or toy_app(), profiles=named_fleet("paper-5", num_nodes), **settings)


def records_of(tifl, grid=None, num_rounds=10, **settings):
    """Run, and return the history."""
    run = History(tifl)
    run.start(grid or paper_grid(), toy_arrays(), num_rounds, **settings)
    return run.records


def round_of(message):
    return message.content["config"].get(keys.SERVER_ROUND, 0)


class Answers(LocalGrid):
    """A fleet with nodes of speed 1, 2, ... in which a function may answer for a node."""

    def __init__(self, num_nodes, instead=lambda partition, message: None, app=None, **settings):
        profiles = [DeviceProfile(1 + i) for i in range(num_nodes)]
        super().__init__(app or toy_app(), profiles, **settings)
        self.instead, self.asked = instead, []

    def _answer(self, message, node_id):
        partition, kind = node_id - 1000, message.metadata.message_type
        self.asked.append((partition, kind))
        match self.instead(partition, message):
            case "silent":
                return float("inf"), None
            case "away":
                error = Message(Error(NODE_UNAVAILABLE, "away"), reply_to=message)
                return self.virtual_time_s, error
        return super()._answer(message, node_id)

    def count(self, partition, kind):
        """Return how often a node was sent messages of a type."""
        return self.asked.count((partition, kind))

"""What the tests of TiFL on a fleet share."""

from flwr.serverapp.strategy import FedAvg
from recording import History
from toy import toy_app, toy_arrays

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid, named_fleet
from flwr_hetero.strategy import TiFL

PROFILE = keys.PROFILE_MESSAGE


def make_tifl(inner=None, **settings):
    """Two tiers, two nodes a round, uniform, with the paper's phase."""
    defaults = {"clients_per_round": 2, "num_tiers": 2, "policy": "uniform", "profiling": "phase"}
    return TiFL(inner or FedAvg(fraction_evaluate=0.0), **(defaults | settings))


def paper_grid(num_nodes=20, app=None, **settings):
    """Five equal groups of nodes that train 100 examples in 0.25, 0.5, 1, 2 and 10 s."""
    return LocalGrid(app or toy_app(), profiles=named_fleet("paper-5", num_nodes), **settings)


def records_of(tifl, grid=None, num_rounds=10, **settings):
    run = History(tifl)
    run.start(grid or paper_grid(), toy_arrays(), num_rounds, **settings)
    return run.records


class Answers(LocalGrid):
    """A fleet of nodes of speed 1, 2, ...; ``away`` tells which message does not reach its node."""

    def __init__(self, num_nodes, away=lambda partition, message: False, app=None, **settings):
        profiles = [DeviceProfile(1 + i) for i in range(num_nodes)]
        super().__init__(app or toy_app(), profiles, **settings)
        self.away = away
        self.asked = []

    def push_messages(self, messages):
        return [message_id for m in messages for message_id in self._push_one(m)]

    def _push_one(self, message):
        node_id = message.metadata.dst_node_id
        kind = message.metadata.message_type
        self.asked.append((node_id - 1000, kind))
        online = dict(self._online)
        if self.away(node_id - 1000, message):
            self.leave(node_id)
        pushed = list(super().push_messages([message]))
        self._online.clear()
        self._online.update(online)  # in place: others hold its keys
        return pushed

    def count(self, partition, kind):
        return self.asked.count((partition, kind))

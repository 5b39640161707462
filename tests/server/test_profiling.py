import pytest
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg
from toy import toy_app, toy_arrays

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import SamplerFacts, Wrapper


def reporting(by_node):
    """A mod that reports statistics of each node's sampler."""

    def mod(message, context, call_next):
        reply = call_next(message, context)
        reported = by_node[int(context.node_config["partition-id"])]
        if reported is not None:
            reply.content[keys.SAMPLER] = ConfigRecord(reported)
        return reply

    return mod


class Inside(Wrapper):
    def __init__(self):
        super().__init__(FedAvg(fraction_evaluate=0.0))
        self.records = []

    def on_replies(self, server_round, replies):
        self.records += [set(reply.content) for reply in replies]
        return replies


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("by_node", "expected"),
    [
        (
            [{"mean-age": float(i), "importance.50": 0.5, "importance.90": 2.0} for i in range(3)],
            {"mean-age": 1.0, "importance": {"50": 0.5, "90": 2.0}},
        ),
        ([None, {"mean-age": 4.0}, None], {"mean-age": 4.0}),
        ([None, None, None], {}),
        ([{"mean-age": 3.0}, {"mean-age": NAN}, {"mean-age": INF}], {"mean-age": 3.0}),
        ([{"mean-age": 3.0}, {"mean-age": "much"}, {"mean-age": [1.0]}], {"mean-age": 3.0}),
        # a number where others send a group
        ([{"group.50": 1.5}, {"group": 1.0, "group.50": 0.5}, None], {"group": {"50": 1.0}}),
    ],
)
def test_means_over_the_nodes_grouped_by_name(by_node, expected):
    inside = Inside()
    strategy = SamplerFacts(inside)
    grid = LocalGrid(toy_app(mods=[reporting(by_node)]), profiles=[DeviceProfile()] * 3)
    strategy.start(grid, toy_arrays(), 1)
    assert len(inside.records) == 3
    assert not any(keys.SAMPLER in names for names in inside.records)
    assert strategy.round_info() == expected

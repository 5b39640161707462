import pytest
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg
from toy import toy_app, toy_arrays

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import SamplerFacts, Wrapper


def reporting(facts):
    """A mod that says ``facts`` of node i's sampler."""

    def mod(message, context, call_next):
        reply = call_next(message, context)
        said = facts(int(context.node_config["partition-id"]))
        if said is not None:
            reply.content[keys.SAMPLER] = ConfigRecord(said)
        return reply

    return mod


class Inside(Wrapper):
    def __init__(self):
        super().__init__(FedAvg(fraction_evaluate=0.0))
        self.records = []

    def on_replies(self, server_round, replies):
        self.records += [set(reply.content) for reply in replies]
        return replies


def info(facts):
    inside = Inside()
    strategy = SamplerFacts(inside)
    grid = LocalGrid(toy_app(mods=[reporting(facts)]), profiles=[DeviceProfile()] * 3)
    strategy.start(grid, toy_arrays(), 1)
    assert not any(keys.SAMPLER in names for names in inside.records)
    assert len(inside.records) == 3
    return strategy.round_info()


def test_means_over_the_nodes_grouped_by_name():
    facts = lambda node: {"mean-age": float(node), "importance.50": 0.5, "importance.90": 2.0}  # noqa: E731
    assert info(facts) == {"mean-age": 1.0, "importance": {"50": 0.5, "90": 2.0}}


def test_nodes_that_say_nothing_do_not_count():
    assert info(lambda node: {"mean-age": 4.0} if node == 1 else None) == {"mean-age": 4.0}
    assert info(lambda node: None) == {}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "much", [1.0]])
def test_nonsense_is_passed_over(bad):
    assert info(lambda node: {"mean-age": bad if node else 3.0}) == {"mean-age": 3.0}

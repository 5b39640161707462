import pytest
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg
from toy import toy_app, toy_arrays

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import SamplerFacts, Wrapper


def reporting(stats):
    """A mod that reports ``stats`` of node i's sampler."""

    def mod(message, context, call_next):
        reply = call_next(message, context)
        reported = stats(int(context.node_config["partition-id"]))
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


def info(stats):
    inside = Inside()
    strategy = SamplerFacts(inside)
    grid = LocalGrid(toy_app(mods=[reporting(stats)]), profiles=[DeviceProfile()] * 3)
    strategy.start(grid, toy_arrays(), 1)
    assert not any(keys.SAMPLER in names for names in inside.records)
    assert len(inside.records) == 3
    return strategy.round_info()


def test_means_over_the_nodes_grouped_by_name():
    stats = lambda node: {"mean-age": float(node), "importance.50": 0.5, "importance.90": 2.0}  # noqa: E731
    assert info(stats) == {"mean-age": 1.0, "importance": {"50": 0.5, "90": 2.0}}


def test_nodes_without_a_record_do_not_count():
    assert info(lambda node: {"mean-age": 4.0} if node == 1 else None) == {"mean-age": 4.0}
    assert info(lambda node: None) == {}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "much", [1.0]])
def test_no_finite_number_is_left_out(bad):
    assert info(lambda node: {"mean-age": bad if node else 3.0}) == {"mean-age": 3.0}


def test_number_where_others_send_a_group_is_left_out():
    hostile = {"importance": 1.0, "importance.50": 0.5}
    assert info(lambda node: hostile if node else {"importance.50": 1.5}) == {
        "importance": {"50": pytest.approx(2.5 / 3)}
    }

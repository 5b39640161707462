import pytest
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg
from tifl_toy import PROFILE, Answers, make_tifl
from toy import rewriting, toy_app, toy_arrays

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.strategy import SamplerMetrics, Wrapper


class Inside(Wrapper):
    records = ()

    def on_replies(self, context, replies):
        self.records = [set(reply.content) for reply in replies]
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
    def report(partition, message, reply):
        if by_node[partition] is not None:
            reply.content[keys.SAMPLER] = ConfigRecord(by_node[partition])

    inside = Inside(FedAvg(fraction_evaluate=0.0))
    strategy = SamplerMetrics(inside)
    grid = LocalGrid(toy_app(mods=[rewriting(report)]), profiles=[DeviceProfile()] * 3)
    strategy.start(grid, toy_arrays(), 1)
    assert len(inside.records) == 3
    assert not any(keys.SAMPLER in names for names in inside.records)
    assert strategy.round_info() == expected


def test_one_node_is_asked_whether_there_is_a_handler(caplog):
    rounds = []

    def watch(partition, message):
        rounds.append(message.content["config"][keys.SERVER_ROUND])
        return False

    def join(server_round, arrays):
        if server_round == 1:
            grid.join(DeviceProfile(5.0))

    grid = Answers(4, watch, app=toy_app(profile=False))
    tifl = make_tifl(sync_rounds=1, warmup_rounds=0)
    tifl.start(grid, toy_arrays(), 6, evaluate_fn=join)
    assert [asked for asked in grid.asked if asked[1] == PROFILE] == [(0, PROFILE)]
    assert sorted(tifl.tiers.tier) == [f"node-{i}" for i in range(5)]
    assert min(rounds) == 1
    assert "reply dropped" not in caplog.text
    assert caplog.text.count("The ClientApp has no handler for train.profile") == 1


def test_a_silent_node_costs_one_time_out():
    grid = Answers(4, faults=[Fault(0, "dies")])
    tifl = make_tifl(sync_rounds=1, warmup_rounds=0)
    tifl.start(grid, toy_arrays(), 0)
    assert tifl.fleet.clock.virtual_s == pytest.approx(600.0 + 600.0)
    assert tifl.fleet.nodes.profile_kind is None
    assert len(tifl.tiers.tier) == 3

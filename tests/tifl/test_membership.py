import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from tifl_toy import PROFILE, Answers, make_tifl, paper_grid, profile_round, records_of
from toy import toy_app, toy_arrays

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.mod import timing
from flwr_hetero.server.nodes import NodeBook
from flwr_hetero.strategy import TiFL
from flwr_hetero.tifl.failures import FailureCounter
from flwr_hetero.tifl.grouping import TierRule, tier_fleet

# --- profiling -------------------------------------------------------------------------


def test_tier_fleet_groups_by_median_latency(caplog):
    registry, nan = NodeBook(), np.nan
    for node_id, partition in ((71, 10), (72, 2), (73, 1)):
        registry.set_partition_id(node_id, partition)
    rounds = np.array([[3.0, 1.0, nan], [9.0, 1.0, nan], [3.1, nan, 50.0]])
    rule = TierRule("quantile", 3, 20.0)
    tiers, tiering, ordered, remark, _ = tier_fleet([71, 72, 73], rounds, registry, rule)
    assert list(tiers.latency.items()) == [("node-1", 20.0), ("node-2", 1.0), ("node-10", 3.1)]
    assert tiers.tier == {"node-2": 0, "node-10": 1}
    assert tiering.tier.tolist() == [-1, 0, 1]
    np.testing.assert_array_equal(ordered, rounds[:, [2, 1, 0]])
    assert "2 tiers instead of 3" in remark
    assert tier_fleet([73], rounds[:, [2]], registry, rule) is None


def test_profiling_counts_as_time_without_training():
    app, kinds = ClientApp(), []

    @app.train("profile")
    def report(message, context):
        kinds.append("profile")
        return Message(RecordDict({"m": MetricRecord({"num-examples": 100})}), reply_to=message)

    grid = LocalGrid(app, profiles=[DeviceProfile(1.0), DeviceProfile(0.5)])
    records = records_of(make_tifl(sync_rounds=3, warmup_rounds=2), grid, 0)
    assert len(kinds) == 1 + 2 * 5  # the first tells that there is a handler
    assert records[0]["virtual_s"] == pytest.approx(1.0 + 5 * 2.0)


def test_warm_up_rounds_do_not_count():
    grid = Answers(4, lambda partition, message: profile_round(message) in ((1, 0), (1, 2)))
    records = records_of(make_tifl(warmup_rounds=1, sync_rounds=3), grid, 0)
    assert records[0]["tifl"]["latency"]["node-0"] == pytest.approx(1.0)


def test_profiling_falls_back_to_plain_training():
    grid = paper_grid(10, toy_app(profile=False))
    records = records_of(TiFL(FedAvg(fraction_evaluate=0.0), 2, profiling="phase"), grid, 1)
    assert records[0]["tifl"]["tiers"] == {f"node-{i}": i // 2 for i in range(10)}


def test_profiling_replies_may_hold_any_metrics():
    def differ(message, context, call_next):
        reply, partition = call_next(message, context), context.node_config["partition-id"]
        if message.metadata.message_type == PROFILE and partition == 0:
            del reply.content["metrics"]
        if message.metadata.message_type == PROFILE and partition == 1:
            raise RuntimeError("cannot")  # its plain training has other metrics: a loss
        if message.metadata.message_type == PROFILE and partition == 2:
            reply.content["b"] = MetricRecord({"b": 1.0})
        return reply

    grid = LocalGrid(toy_app(mods=[differ, timing]), profiles=[DeviceProfile()] * 4)
    records = records_of(make_tifl(warmup_rounds=1), grid, 1)
    assert records[0]["tifl"]["dropouts"] == []
    assert sorted(records[0]["tifl"]["latency"]) == [f"node-{i}" for i in range(4)]


def test_dropout_comes_back_with_the_next_profiling():
    grid = paper_grid(10, faults=[Fault(0, "dies", 1, 4, message_type=PROFILE)])
    tifl = make_tifl(num_tiers=5, profile_interval=5, t_max=60)
    records = records_of(tifl, grid, 6)
    assert records[0]["tifl"]["dropouts"] == ["id-1000"]  # it never said who it is
    assert "tiers" not in records[4]["tifl"]
    assert records[5]["tifl"]["tiers"]["node-0"] == 0


def profilings_die(num_nodes, server_round):
    settings = {"first_round": server_round, "last_round": server_round, "message_type": PROFILE}
    return Answers(num_nodes, faults=[Fault(i, "dies", **settings) for i in range(num_nodes)])


def test_first_profiling_without_an_answer_is_an_error():
    with pytest.raises(RuntimeError, match="no node answered the profiling within t_max=9 s"):
        records_of(make_tifl(t_max=9), profilings_die(3, 1))


def test_tiers_stay_if_a_later_profiling_fails(caplog):
    tifl = make_tifl(profile_interval=2, t_max=5.0)
    assert all(r["selected"] for r in records_of(tifl, profilings_die(4, 2), 3)[1:])
    assert "the tiers stay as they are" in caplog.text
    assert len(tifl.tiers.tier) == 4


# --- late joiners ----------------------------------------------------------------------


def join_after_round_1(grid, factor=2.0):
    return lambda r, arrays: grid.join(DeviceProfile(factor)) and None if r == 1 else None


def test_late_joiner_is_placed_alongside_training():
    grid, tifl = paper_grid(), make_tifl(clients_per_round=4, num_tiers=5, policy=[0, 0, 1, 0, 0])
    records = records_of(tifl, grid, 30, evaluate_fn=join_after_round_1(grid, 1.1))
    assert tifl.tiers.tier["node-20"] == 2
    assert "node-20" in {name for record in records for name in record["selected"]}
    # training went on: every round but the joiner's own took the tier's second
    assert records[-1]["virtual_s"] - records[0]["virtual_s"] < 33


def test_late_joiner_without_profiling_is_trained():
    grid, tifl = Answers(4, app=toy_app(profile=False)), make_tifl()
    tifl.start(grid, toy_arrays(), 15, evaluate_fn=join_after_round_1(grid))
    assert "node-4" in tifl.tiers.tier


def test_late_joiner_that_keeps_raising_is_left_out(caplog):
    grid, tifl = Answers(4, faults=[Fault(4, "errs")]), make_tifl(max_failures=2)
    tifl.start(grid, toy_arrays(), 45, evaluate_fn=join_after_round_1(grid))
    assert [grid.count(4, kind) for kind in (PROFILE, "train")] == [2, 0]
    assert "id-1004 failed 2 times in a row" in caplog.text
    assert set(tifl.tiers.tier) == {f"node-{i}" for i in range(4)}


def test_late_joiner_not_reached_is_asked_again():
    def away_at_first(partition, message):
        return partition == 4 and message.content["config"][keys.SERVER_ROUND] < 10

    grid, tifl = Answers(4, away_at_first), make_tifl()
    tifl.start(grid, toy_arrays(), 30, evaluate_fn=join_after_round_1(grid))
    assert grid.count(4, PROFILE) == 2
    assert "node-4" in tifl.tiers.tier


def test_node_away_in_a_profiling_is_placed_on_return():
    grid, tifl = Answers(5), make_tifl(profile_interval=5)

    def come_and_go(server_round, arrays):
        if server_round == 4:
            grid.leave(1002)
        if server_round == 5:
            assert "node-2" not in tifl.tiers.tier
            grid.come_back(1002)

    tifl.start(grid, toy_arrays(), 9, evaluate_fn=come_and_go)
    assert "node-2" in tifl.tiers.tier
    assert grid.count(2, PROFILE) == 4 + 1


# --- failures in a row -----------------------------------------------------------------


def test_failure_counter_counts_in_a_row(caplog):
    counter = FailureCounter(2)
    counter.record_training({"b"}, {"a"})
    counter.record_evaluation({"b"}, {"a", "c"})  # a is judged by its training
    assert (counter.failures, counter.evaluation) == ({"a": 1}, {"c": 1})
    counter.record_training({"c"}, {"a"})
    assert counter.evaluation == {}
    assert counter.blocked == {"a"}
    assert "a failed 2 times in a row" in caplog.text
    counter.record_training({"a"}, set())
    assert counter.failures == {}
    counter.record_training(set(), {"a", "b"})
    counter.record_evaluation(set(), {"c"})
    counter.clear()
    assert (counter.failures, counter.evaluation) == ({}, {})


def test_a_good_evaluation_ends_a_row_of_bad_ones_only():
    counter = FailureCounter(2)
    counter.record_training(set(), {"a"})
    counter.record_training(set(), set())
    for _ in range(3):
        counter.record_evaluation(set(), {"b"})
        counter.record_evaluation({"a", "b"}, set())
    assert counter.blocked == set()
    counter.record_training(set(), {"a"})
    assert counter.blocked == {"a"}


def test_nodes_are_asked_again_when_no_other_is_left():
    faults = [Fault(i, "errs", 3 + i, 3 + i, message_type="train") for i in range(4)]
    tifl = TiFL(FedAvg(fraction_evaluate=0.0), 4, 1, policy="vanilla", max_failures=1)
    records = records_of(tifl, Answers(4, faults=faults), 8)
    assert [len(record["selected"]) for record in records[3:]] == [4, 3, 2, 1, 4, 4]


def test_node_that_keeps_failing_is_not_asked():
    """Until the next profiling."""
    faults = [Fault(0, "errs", message_type="train", first_round=2, last_round=7)]
    settings = {"policy": "fast", "max_failures": 3, "profile_interval": 8}
    tifl = make_tifl(num_tiers=5, **settings)
    records = records_of(tifl, paper_grid(10, faults=faults), 8)
    assert [len(record["selected"]) for record in records[1:]] == [2, 2, 2, 2, 1, 1, 1, 2]


def test_a_node_that_kept_failing_tries_again_when_tiers_are_formed():
    """Every ten rounds by default, once if it fails again."""
    faults = [Fault(0, "errs", first_round=5, last_round=24, message_type="train")]
    tifl = TiFL(FedAvg(fraction_evaluate=0.0), 4, 1, policy="vanilla")
    records = records_of(tifl, Answers(4, faults=faults), 40)
    asked = [number for number, record in enumerate(records) if "node-0" in record["selected"]]
    assert asked == [1, 2, 3, 4, 5, 6, 7, 12, 22, *range(32, 41)]


def test_failures_of_a_profiling_do_not_count():
    def early(partition, message):
        return partition == 0 and profile_round(message) in ((2, 0), (2, 1), (2, 2))

    tifl = make_tifl(profile_interval=2, max_failures=1)
    tifl.start(Answers(4, early), toy_arrays(), 2)
    assert "node-0" in tifl.tiers.tier
    assert tifl.failures.failures == {}


def test_failures_count_inside_flowers_own_wrapper():
    tifl = make_tifl(clients_per_round=4, num_tiers=1, policy="vanilla", max_failures=2)
    outer = DifferentialPrivacyServerSideFixedClipping(tifl, 0.01, 1.0, 4)
    tifl.start(Answers(4), toy_arrays(buffer=False), 0)  # profiles
    grid = Answers(4, faults=[Fault(0, "dies")])
    outer.start(grid, toy_arrays(buffer=False), 4)
    assert grid.count(0, "train") == 2


def test_blocked_nodes_do_not_evaluate_either():
    tifl = make_tifl(policy="adaptive", interval=1, max_failures=1)
    grid = Answers(4, faults=[Fault(0, "dies", first_round=2)])

    def forget_round_1(server_round, arrays):
        if server_round == 1:
            grid.asked.clear()

    tifl.start(grid, toy_arrays(), 6, timeout=100, evaluate_fn=forget_round_1)
    assert tifl.failures.blocked == {"node-0"}
    assert grid.count(0, "train") + grid.count(0, "evaluate") == 1


@pytest.mark.parametrize(("deaf", "failures"), [({0}, {"node-0": 1}), ({0, 1, 2, 3}, {})])
def test_failures_in_evaluation_count(deaf, failures):
    """But not if no node answers: it may be the ClientApp that cannot evaluate."""
    faults = [Fault(partition, "dies", message_type="evaluate") for partition in deaf]
    tifl = make_tifl(clients_per_round=1, policy="adaptive", interval=1, seed=2)
    tifl.start(Answers(4, faults=faults), toy_arrays(), 1, timeout=100)
    assert tifl.draw.tier == 0  # node 0 is in the slow one
    assert tifl.failures.evaluation == failures

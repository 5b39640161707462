"""TiFL when nodes fail, go and come back, cannot do what they are asked, or the server resumes."""

import logging

import numpy as np
import pytest
from flwr.app import Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from toy import toy_app, toy_arrays

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.strategy import CDGraB, LocalSteps, TiFL

PROFILE, AWAY = "train.profile", 5


class Answers(LocalGrid):
    """A fleet with nodes of speed 1, 2, ... in which a function may answer for a node."""

    def __init__(self, num_nodes, instead=lambda partition, message: False, app=None, **settings):
        profiles = [DeviceProfile(1 + i) for i in range(num_nodes)]
        super().__init__(app or toy_app(), profiles, **settings)
        self.instead = instead
        self.asked = []

    def _answer(self, message, node_id):
        partition, kind = node_id - 1000, message.metadata.message_type
        self.asked.append((partition, kind))
        match self.instead(partition, message):
            case "silent":
                return float("inf"), None
            case "away":
                return self.virtual_time_s, Message(Error(AWAY, "away"), reply_to=message)
        return super()._answer(message, node_id)

    def count(self, partition, kind):
        return self.asked.count((partition, kind))


def make(inner=None, **settings):
    defaults = {"clients_per_round": 2, "num_tiers": 2, "policy": "uniform"}
    return TiFL(inner or FedAvg(fraction_evaluate=0.0), **(defaults | settings))


def of_round(message):
    return message.content["config"].get(keys.SERVER_ROUND, 0)


# --- profiling -----------------------------------------------------------------------


def test_replies_of_a_profiling_need_not_agree_on_their_metrics():
    app = toy_app(profile=False)

    @app.train("profile")
    def profile(message, context):
        if context.node_config["partition-id"] < 2:
            raise RuntimeError("this board cannot")  # its train has other metrics: a loss
        metrics = MetricRecord({"num-examples": 100})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    tifl = make()
    tifl.start(Answers(5, app=app), toy_arrays(), 1)
    assert sorted(tifl.table.tier) == [f"node-{i}" for i in range(5)]


def test_a_profiling_reply_may_hold_any_metric_records():
    app = toy_app(profile=False)

    @app.train("profile")
    def profile(message, context):
        content = RecordDict({"a": MetricRecord({"a": 1.0}), "b": MetricRecord({"b": 1.0})})
        if context.node_config["partition-id"] < 3:
            content = RecordDict({"metrics": MetricRecord({"num-examples": 100})})
        return Message(content, reply_to=message)

    tifl = make()
    tifl.start(Answers(4, app=app), toy_arrays(), 1)
    assert len(tifl.table.tier) == 4


def test_the_tiers_outlive_a_profiling_without_an_answer(caplog):
    def outage(partition, message):
        profiling = message.metadata.message_type == PROFILE
        return "silent" if profiling and of_round(message) == 2 else None

    tifl = make(profile_interval=2, t_max=5.0)
    with caplog.at_level(logging.WARNING):
        result = tifl.start(Answers(4, outage), toy_arrays(), 5)
    assert list(result.train_metrics_clientapp) == [1, 2, 3, 4, 5]
    assert "the tiers stay as they are" in caplog.text
    assert len(tifl.table.tier) == 4


def test_a_node_that_was_away_when_all_were_profiled_again_is_placed_on_its_return():
    grid = Answers(5)

    def come_and_go(server_round, arrays):
        if server_round == 4:
            grid.leave(1002)
        if server_round == 5:
            grid.come_back(1002)

    tifl = make(profile_interval=5)
    tifl.start(grid, toy_arrays(), 5, evaluate_fn=come_and_go)
    assert "node-2" not in tifl.table.tier
    tifl = make(profile_interval=20)
    grid = Answers(5)
    grid.asked.clear()
    tifl.start(grid, toy_arrays(), 35, evaluate_fn=lambda r, a: come_and_go(r - 15, a))
    assert grid.count(2, PROFILE) == 4 + 1
    assert "node-2" in tifl.table.tier


# --- newcomers -----------------------------------------------------------------------


def join_after_round_1(grid):
    def join(server_round, arrays):
        if server_round == 1:
            grid.join(DeviceProfile(2.0))

    return join


def test_a_newcomer_that_cannot_be_profiled_is_timed_by_plain_training():
    grid, tifl = Answers(4, app=toy_app(profile=False)), make()
    tifl.start(grid, toy_arrays(), 15, evaluate_fn=join_after_round_1(grid))
    assert "node-4" in tifl.table.tier


def test_a_newcomer_that_raises_at_plain_training_too_is_left_out_and_logged(caplog):
    broken = Fault(4, "errs")
    grid, tifl = Answers(4, faults=[broken]), make()
    with caplog.at_level(logging.WARNING):
        tifl.start(grid, toy_arrays(), 25, evaluate_fn=join_after_round_1(grid))
    assert [grid.count(4, kind) for kind in (PROFILE, "train")] == [1, 1]
    assert "id-1004 could not be profiled: injected error" in caplog.text


def test_a_newcomer_that_was_not_reached_is_asked_again():
    def away_at_first(partition, message):
        return "away" if partition == 4 and of_round(message) < 10 else None

    grid, tifl = Answers(4, away_at_first), make()
    tifl.start(grid, toy_arrays(), 30, evaluate_fn=join_after_round_1(grid))
    assert grid.count(4, PROFILE) == 2
    assert "node-4" in tifl.table.tier


# --- resume --------------------------------------------------------------------------


def resumed(state, grid, num_rounds, **settings):
    tifl = make(**settings)
    tifl.load_state_dict(state)
    return tifl, tifl.start(grid, toy_arrays(), num_rounds)


def state_after(num_rounds, grid, **settings):
    tifl = make(**settings)
    tifl.start(grid, toy_arrays(), num_rounds)
    return tifl.state_dict()


def test_a_resumed_run_finds_nodes_whose_app_cannot_be_profiled():
    def fleet():
        return Answers(4, app=toy_app(profile=False))

    _, result = resumed(state_after(2, fleet()), fleet(), 5)
    assert list(result.train_metrics_clientapp) == [1, 2, 3, 4, 5]


def test_nodes_that_can_be_profiled_are_asked_once_who_they_are():
    grid = Answers(4)
    tifl, _ = resumed(state_after(2, Answers(4)), grid, 0)
    assert grid.asked == [(i, PROFILE) for i in range(4)]
    assert tifl.session.failures == []


def test_a_resumed_run_says_that_it_finds_no_node_again(caplog):
    deaf = [Fault(i, "errs", message_type=PROFILE) for i in range(4)]
    deaf += [Fault(i, "errs", message_type="train", first_round=0, last_round=0) for i in range(4)]
    with caplog.at_level(logging.WARNING):
        resumed(state_after(2, Answers(4)), Answers(4, faults=deaf), 0)
    assert "none of the 4 nodes with a tier was found again among 4 online" in caplog.text


def test_a_node_that_joined_while_the_server_was_down_gets_a_tier():
    grid = Answers(4)
    state = state_after(2, grid)
    grid.join(DeviceProfile(2.5))
    tifl, _ = resumed(state, grid, 5)
    assert "node-4" in tifl.table.tier


@pytest.mark.parametrize("credits", ["equal", "geometric", "paced", 3, None])
def test_restored_credits_are_those_saved_without_a_word(credits, caplog):
    state = state_after(3, Answers(4), credits=credits)
    caplog.clear()
    tifl = make(credits=credits)
    with caplog.at_level(logging.INFO):
        tifl.load_state_dict(state)
    assert "credits" not in caplog.text
    assert tifl.state_dict() == state


# --- failures in a row ---------------------------------------------------------------


def test_failures_of_a_profiling_are_no_failures_of_the_round():
    def flaky(partition, message):
        again = message.metadata.message_type == PROFILE and of_round(message) > 0
        return (
            "away"
            if again and partition == 0 and message.content["config"][keys.PROFILE_ROUND] < 3
            else None
        )

    tifl = make(profile_interval=2, max_failures=1)
    tifl.start(Answers(4, flaky), toy_arrays(), 2)
    assert "node-0" in tifl.table.tier
    assert tifl.probation.strikes == {}


def spoilt_order(message, context, call_next):
    reply = call_next(message, context)
    if keys.ORDER in message.content.config_records and context.node_config["partition-id"] == 0:
        reply.content[keys.ORDER] = message.content[keys.ORDER]  # no vectors
    return reply


@pytest.mark.parametrize(
    "nest", [lambda **s: make(CDGraB(FedAvg()), **s), lambda **s: CDGraB(make(FedAvg(), **s))]
)
def test_replies_that_an_inner_wrapper_drops_count_as_failures(nest):
    strategy = nest(clients_per_round=4, num_tiers=1, policy="vanilla", max_failures=2)
    strategy.start(Answers(4, app=toy_app(mods=[spoilt_order])), toy_arrays(), 4)
    (tifl,) = [wrapper for wrapper in strategy.wrappers() if isinstance(wrapper, TiFL)]
    assert tifl.probation.strikes == {"node-0": 2}


@pytest.mark.parametrize("wrap", [lambda tifl: tifl, lambda tifl: CDGraB(tifl)])
def test_a_tier_whose_replies_are_all_dropped_further_in_gets_its_credit_back(wrap):
    def spoil(message, context, call_next):
        reply = call_next(message, context)
        if reply.has_content() and "arrays" in reply.content:
            reply.content["metrics"]["num-steps"] = -1.0
        return reply

    tifl = make(LocalSteps(FedAvg()), credits=5)
    wrap(tifl).start(Answers(4, app=toy_app(mods=[spoil])), toy_arrays(), 1)
    assert tifl.chooser.credits.tolist() == [5, 5]


def test_a_node_that_claims_too_many_steps_but_counts_has_not_failed():
    def boast(message, context, call_next):
        reply = call_next(message, context)
        reply.content["metrics"]["num-steps"] = 1000
        return reply

    tifl = make(LocalSteps(FedAvg(fraction_evaluate=0.0)), max_failures=1)
    grid = Answers(4, app=toy_app(mods=[boast]))
    result = tifl.start(grid, toy_arrays(), 4)
    assert len(result.train_metrics_clientapp) == 4
    assert tifl.probation.strikes == {}


def test_failures_count_inside_flowers_own_wrapper():
    def dead(partition, message):
        return "silent" if partition == 0 and message.metadata.message_type == "train" else None

    tifl = make(clients_per_round=4, num_tiers=1, policy="vanilla", max_failures=2)
    outer = DifferentialPrivacyServerSideFixedClipping(tifl, 0.01, 1.0, 4)
    grid = Answers(4, dead)
    outer.start(grid, toy_arrays(buffer=False), 4)
    assert grid.count(0, "train") == 2


def test_nodes_that_are_barred_are_not_asked_to_evaluate_either():
    def dead(partition, message):
        return "silent" if partition == 0 and message.metadata.message_type != PROFILE else None

    grid, tifl = Answers(4, dead), make(policy="adaptive", interval=1, max_failures=1)
    tifl.start(grid, toy_arrays(), 6, timeout=100)
    assert tifl.probation.barred == {"node-0"}
    assert grid.count(0, "train") + grid.count(0, "evaluate") == 1


def test_failures_in_evaluation_count():
    def deaf(partition, message):
        return "away" if partition == 0 and message.metadata.message_type == "evaluate" else None

    # node 0 is the slowest, and only the fast tier trains
    settings = {"policy": "adaptive", "start_policy": "fast", "interval": 1, "trigger": "always"}
    grid, tifl = Answers(4, deaf), make(max_failures=2, exponent=0.0, **settings)
    tifl.start(grid, toy_arrays(), 1)
    assert tifl.probation.strikes == {"node-0": 1}


def test_an_app_that_cannot_evaluate_bars_nobody():
    app = toy_app()
    del app._registered_funcs["evaluate.default"]
    tifl = make(FedAvg(), max_failures=1)
    result = tifl.start(Answers(4, app=app), toy_arrays(), 5)
    assert len(result.train_metrics_clientapp) == 5


# --- credits -------------------------------------------------------------------------


def test_spent_credits_end_the_run_though_a_tier_that_is_away_has_some():
    grid, tifl = Answers(4), make(clients_per_round=1, credits=1, on_exhausted="stop")

    def leave(server_round, arrays):
        if server_round == 1:
            for name in tifl.table.members[1 - tifl.current_tier]:
                grid.leave(tifl.session.registry.find(name))

    result = tifl.start(grid, toy_arrays(), 8, evaluate_fn=leave)
    assert list(result.train_metrics_clientapp) == [1]
    assert tifl.session.stop_reason == "the credits of all tiers that have nodes are spent"


def test_credits_may_be_an_array():
    tifl = make(credits=np.array([3, 1]))
    tifl.start(Answers(4), toy_arrays(), 2)
    assert tifl.chooser.credits.sum() == 2

import itertools
import random

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from recording import History
from toy import toy_app, toy_arrays

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid, named_fleet
from flwr_hetero.mod import timing
from flwr_hetero.strategy import TiFL, Wrapper
from flwr_hetero.tifl.tiers import TierChooser

QUIET = {"fraction_evaluate": 0.0}


def run(tifl, grid=None, num_rounds=10, **kwargs):
    grid = grid or LocalGrid(toy_app(), profiles=named_fleet("paper-5", 20))
    rounds = History(tifl)
    result = rounds.start(grid, kwargs.pop("arrays", toy_arrays()), num_rounds, **kwargs)
    return rounds.records, result, grid


def selections(records):
    return [sorted(record["selected"]) for record in records[1:]]


# --- the paper's mechanism -----------------------------------------------------------


def test_a_round_trains_one_tier_and_costs_its_latency():
    records, _, _ = run(TiFL(flower.FedAvg(**QUIET), 2, policy="uniform"), num_rounds=30)
    tiers = records[0]["tifl"]["tiers"]
    assert dict(tiers.items()) == {f"node-{i}": i // 4 for i in range(20)}
    for before, record in itertools.pairwise(records):
        tier = record["tifl"]["tier"]
        assert {tiers[name] for name in record["selected"]} == {tier}
        assert len(record["selected"]) == 2
        latency = 1 / (4.0, 2.0, 1.0, 0.5, 0.1)[tier]  # 100 examples at 0.01 s
        assert record["virtual_s"] - before["virtual_s"] == pytest.approx(latency)


def test_static_chances_are_the_tables():
    records, _, _ = run(TiFL(flower.FedAvg(**QUIET), 2, policy="random"), num_rounds=600)
    counts = np.bincount([r["tifl"]["tier"] for r in records[1:]], minlength=5) / 600
    # four standard errors of a binomial share at n = 600
    assert counts == pytest.approx([0.7, 0.1, 0.1, 0.05, 0.05], abs=0.075)


def test_profiling_needs_no_training_and_counts_as_time():
    app = ClientApp()
    kinds = []

    @app.train("profile")
    def report(message, context):
        kinds.append("profile")
        metrics = MetricRecord({"num-examples": 100})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    grid = LocalGrid(app, profiles=[DeviceProfile(1.0), DeviceProfile(0.5)])
    tifl = TiFL(flower.FedAvg(**QUIET), 1, 2, sync_rounds=3, warmup_rounds=2)
    records, _, _ = run(tifl, grid, num_rounds=0)
    assert len(kinds) == 2 * 5
    assert records[0]["virtual_s"] == pytest.approx(5 * 2.0)


def test_client_app_without_profile_handler_is_timed_by_plain_training():
    grid = LocalGrid(toy_app(profile=False), profiles=named_fleet("paper-5", 10))
    records, _, _ = run(TiFL(flower.FedAvg(**QUIET), 2), grid, num_rounds=2)
    assert records[0]["tifl"]["tiers"] == {f"node-{i}": i // 2 for i in range(10)}


def test_what_else_a_profiling_reply_says_makes_no_dropouts():
    def differ(message, context, call_next):
        reply, partition = call_next(message, context), context.node_config["partition-id"]
        if message.metadata.message_type == keys.PROFILE_MESSAGE and partition == 0:
            del reply.content["metrics"]
        elif message.metadata.message_type == keys.PROFILE_MESSAGE and partition == 2:
            reply.content["metrics"]["loss"] = 1.0
        return reply

    grid = LocalGrid(toy_app(mods=[differ, timing]), profiles=[DeviceProfile()] * 4)
    records, _, _ = run(TiFL(flower.FedAvg(**QUIET), 2, 2), grid, num_rounds=1)
    assert records[0]["tifl"]["dropouts"] == []
    assert sorted(records[0]["tifl"]["latency"]) == [f"node-{i}" for i in range(4)]
    assert records[0]["failures"] == []


def test_warm_up_is_discarded_and_the_median_counts():
    # node 0 is slow in the warm-up (round 0) and in one of three rounds that count
    slow = [
        Fault(0, "late", delay_s=50, message_type="train.profile"),
    ]
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile(2.0)] * 2 + [DeviceProfile(1.0)] * 2)
    original = grid._answer

    def answer(message, node_id):
        config = message.content["config"]
        grid.faults = slow if config.get("profile-round", 9) in (0, 2) else []
        return original(message, node_id)

    grid._answer = answer
    records, _, _ = run(TiFL(flower.FedAvg(**QUIET), 2, 2), grid, num_rounds=0)
    assert records[0]["tifl"]["latency"]["node-0"] == pytest.approx(0.5)


def test_dropout_is_who_misses_every_round_and_comes_back_with_the_next_profiling():
    faults = [Fault(0, "dies", 0, 4, message_type="train.profile")]
    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 10), faults=faults)
    tifl = TiFL(flower.FedAvg(**QUIET), 2, profile_interval=5, t_max=60)
    records, _, _ = run(tifl, grid, num_rounds=6)
    assert records[0]["tifl"]["dropouts"] == ["id-1000"]  # it never said who it is
    assert "tiers" not in records[4]["tifl"]
    assert records[5]["tifl"]["tiers"]["node-0"] == 0


def test_one_time_out_is_no_dropout():
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile(1.0)] * 3 + [DeviceProfile(0.5)])
    original = grid._answer

    def answer(message, node_id):
        late = message.content["config"].get("profile-round") == 1 and node_id == 1000
        grid.faults = [Fault(0, "dies")] if late else []
        return original(message, node_id)

    grid._answer = answer
    records, _, _ = run(TiFL(flower.FedAvg(**QUIET), 1, 2, t_max=30), grid, num_rounds=0)
    assert records[0]["tifl"]["dropouts"] == []
    assert records[0]["tifl"]["latency"]["node-0"] == pytest.approx(1.0)


def test_nobody_answers_profiling_is_one_clear_error():
    faults = [Fault(i, "dies") for i in range(3)]
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile()] * 3, faults=faults)
    with pytest.raises(RuntimeError, match="no node answered the profiling within t_max=9 s"):
        run(TiFL(num_tiers=2, t_max=9), grid)


def test_histogram_drops_empty_bins():
    records, _, _ = run(TiFL(flower.FedAvg(**QUIET), 2, tiering="histogram"), num_rounds=0)
    assert records[0]["tifl"]["num_tiers"] == 2  # 0.25 .. 2 s in one bin, 10 s in the last


def test_estimates_meet_the_actual_time():
    profiles = [DeviceProfile(p.compute_factor, jitter=0.1) for p in named_fleet("paper-5", 50)]
    grid = LocalGrid(toy_app(), profiles=profiles, seed=3)
    tifl = TiFL(flower.FedAvg(**QUIET), 5, policy="fast", sync_rounds=10)
    run(tifl, grid, num_rounds=300)
    assert tifl.estimate.exact_s == pytest.approx(tifl.estimate.actual_s, rel=0.03)
    assert tifl.estimate.paper_s < 0.95 * tifl.estimate.actual_s  # a mean is not a maximum


# --- adaptive ------------------------------------------------------------------------


def accuracy_app(accuracy):
    app = toy_app()
    functions = app._registered_funcs
    del functions["evaluate.default"]

    @app.evaluate()
    def evaluate(message, context):
        server_round = message.content["config"]["server-round"]
        value = accuracy(context.node_config["partition-id"] // 4, server_round)
        metrics = MetricRecord({"num-examples": 10, "eval-acc": value})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def test_adaptive_moves_towards_the_worst_tier():
    app = accuracy_app(lambda tier, server_round: 0.9 - 0.1 * tier)  # never improves
    grid = LocalGrid(app, profiles=named_fleet("paper-5", 20))
    records, _, _ = run(TiFL(flower.FedAvg(**QUIET), 2, interval=5), grid, num_rounds=11)
    assert records[9]["tifl"]["tier_probs"] == [0.2] * 5
    assert records[10]["tifl"]["tier_probs"] == pytest.approx(np.arange(1, 6) / 15)


def test_adaptive_keeps_chances_while_accuracy_improves():
    app = accuracy_app(lambda tier, server_round: 0.01 * server_round - 0.1 * tier)
    grid = LocalGrid(app, profiles=named_fleet("paper-5", 20))
    records, _, _ = run(TiFL(flower.FedAvg(**QUIET), 2, interval=5), grid, num_rounds=20)
    assert records[20]["tifl"]["tier_probs"] == [0.2] * 5


def test_tiers_are_evaluated_only_when_it_is_needed():
    app = toy_app()
    grid = LocalGrid(app, profiles=named_fleet("paper-5", 20))
    tifl = TiFL(flower.FedAvg(**QUIET), 2, interval=4, evaluate_per_tier=3)
    asked = []
    original = tifl.configure_evaluate

    def configure_evaluate(*args):
        messages = original(*args)
        asked.append(len(messages))
        return messages

    tifl.configure_evaluate = configure_evaluate
    run(tifl, grid, num_rounds=8)
    assert asked == [0, 0, 0, 15, 0, 0, 0, 15]


def test_without_an_accuracy_the_chances_stay():
    def no_accuracy(message, context, call_next):
        reply = call_next(message, context)
        for record in reply.content.metric_records.values():
            record.pop("eval-acc", None)
        return reply

    grid = LocalGrid(toy_app(mods=[no_accuracy]), profiles=named_fleet("paper-5", 20))
    records, _, _ = run(TiFL(flower.FedAvg(**QUIET), 2, interval=2), grid, num_rounds=6)
    assert records[-1]["tifl"]["tier_accuracy"] == [None] * 5
    assert records[-1]["tifl"]["tier_probs"] == [0.2] * 5


def test_credits_are_spent_once_a_round_and_refilled():
    tifl = TiFL(flower.FedAvg(**QUIET), 2, 2, policy="uniform", credits=[3, 1])
    records, _, _ = run(tifl, num_rounds=8)
    tiers = [record["tifl"]["tier"] for record in records[1:]]
    assert np.bincount(tiers[:4]).tolist() == [3, 1]
    assert np.bincount(tiers[4:]).tolist() == [3, 1]


@pytest.mark.parametrize(("fleet", "credits"), [("paper-5", [16, 8, 4, 2, 1]), ("2x", [2, 2, 1])])
def test_default_credits_follow_the_measured_latency(fleet, credits):
    twice = [DeviceProfile(2.5), DeviceProfile(2.4), DeviceProfile(1.0)]
    profiles = named_fleet("paper-5", 10) if fleet == "paper-5" else twice
    tifl = TiFL(flower.FedAvg(**QUIET), 1, len(credits))
    run(tifl, LocalGrid(toy_app(), profiles=profiles), num_rounds=1)
    assert tifl.chooser.full_credits.tolist() == credits


def test_after_a_new_profiling_credits_refill_by_the_new_latency():
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile(4.0)] * 2 + [DeviceProfile(0.1)] * 2)
    tifl = TiFL(flower.FedAvg(**QUIET), 1, 2, profile_interval=2)
    run(tifl, grid, num_rounds=1)
    assert tifl.chooser.full_credits.tolist() == [2, 1]
    left = tifl.chooser.credits.copy()
    even = TierChooser(tifl.settings, 2, 10, latency=np.array([1.0, 1.1]))
    even.take_over(tifl.chooser)
    assert even.full_credits.tolist() == [1, 1]
    assert even.credits.tolist() == left.tolist()


def test_spent_credits_can_end_the_run():
    tifl = TiFL(flower.FedAvg(**QUIET), 2, 2, policy="uniform", credits=2, on_exhausted="stop")
    records, _, _ = run(tifl, num_rounds=50)
    assert len(selections(records)) == 5
    assert selections(records)[4] == []


def test_spent_credits_can_be_ignored():
    tifl = TiFL(flower.FedAvg(**QUIET), 2, 2, policy="fast", credits=2, on_exhausted="ignore")
    records, _, _ = run(tifl, num_rounds=20)
    assert records[-1]["tifl"]["credits"] == [None, None]


def test_tier_of_which_nobody_answers_gets_its_credit_back():
    faults = [Fault(i, "errs", 2, 2, message_type="train") for i in range(20)]
    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 20), faults=faults)
    tifl = TiFL(flower.FedAvg(**QUIET), 2, policy="uniform", credits=10)
    records, _, _ = run(tifl, grid, num_rounds=3)
    assert [sum(record["tifl"]["credits"]) for record in records] == [50, 49, 49, 48]


# --- fleets that change --------------------------------------------------------------


def offline(grid, partitions):
    for partition in partitions:
        grid.leave(1000 + partition)


@pytest.mark.parametrize(("mode", "sizes"), [("shrink", {1, 3}), ("borrow", {3}), ("skip", {3})])
def test_small_tier(mode, sizes):
    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 20))
    tifl = TiFL(flower.FedAvg(**QUIET), 3, policy="uniform", on_small_tier=mode)
    tifl.start(grid, toy_arrays(), num_rounds=0)
    offline(grid, (8, 9, 10))  # one node of tier 2 is left
    chosen = []
    for server_round in range(1, 40):
        tifl.configure_train(server_round, toy_arrays(), ConfigRecord(), grid)
        chosen.append((tifl.current_tier, len(tifl.selected)))
    assert {size for _, size in chosen} == sizes
    assert (2 in {tier for tier, _ in chosen}) == (mode != "skip")


def test_a_tier_that_is_gone_is_not_waited_for():
    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 20))
    tifl = TiFL(flower.FedAvg(**QUIET), 3, policy="fast")
    tifl.start(grid, toy_arrays(), num_rounds=0)
    offline(grid, range(4))
    messages = tifl.configure_train(1, toy_arrays(), ConfigRecord(), grid)
    assert len(messages) == 3
    assert tifl.current_tier != 0


def test_all_nodes_gone_stops_with_a_clear_error():
    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 10))

    def leave_all(server_round, arrays):
        if server_round == 2:
            offline(grid, range(10))

    with pytest.raises(RuntimeError, match="no node is online"):
        run(TiFL(), grid, evaluate_fn=leave_all)


def test_joiner_is_profiled_alongside_and_placed_by_the_boundaries():
    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 20))

    def join(server_round, arrays):
        if server_round == 1:
            grid.join(DeviceProfile(1.1))

    tifl = TiFL(flower.FedAvg(**QUIET), 4, policy=[0, 0, 1, 0, 0])
    records, _, _ = run(tifl, grid, num_rounds=30, evaluate_fn=join)
    assert tifl.table.tier["node-20"] == 2
    assert "node-20" in {name for record in records for name in record["selected"]}
    # training went on: every round but the joiner's own took the tier's second
    assert records[-1]["virtual_s"] - records[0]["virtual_s"] < 33


def test_returner_keeps_its_record():
    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 20))

    def come_and_go(server_round, arrays):
        if server_round == 1:
            grid.leave(1000)
        if server_round == 5:
            grid.come_back(1000)

    tifl = TiFL(flower.FedAvg(**QUIET), 3, policy="fast")
    records, _, _ = run(tifl, grid, num_rounds=30, evaluate_fn=come_and_go)
    assert "node-0" not in {name for r in records[2:6] for name in r["selected"]}
    assert "node-0" in {name for r in records[6:] for name in r["selected"]}


def test_node_that_keeps_failing_leaves_its_tier():
    faults = [Fault(0, "errs", message_type="train", first_round=1)]
    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 10), faults=faults)
    tifl = TiFL(flower.FedAvg(**QUIET), 2, policy="fast", max_failures=3)
    records, _, _ = run(tifl, grid, num_rounds=6)
    assert [len(names) for names in selections(records)] == [2, 2, 2, 1, 1, 1]


# --- reproducible, composable, resumable ---------------------------------------------


def test_same_seed_same_run_whatever_the_node_ids():
    def picked(seed, shift):
        random.seed(shift)  # Flower's own sampling must not matter
        grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 20))
        for _ in range(shift):  # other node ids for the same partitions
            grid._nodes = {node + 7919: state for node, state in grid._nodes.items()}
            grid._online = dict.fromkeys(sorted(grid._nodes, key=lambda n: -n))
        tifl = TiFL(flower.FedAvg(**QUIET), 3, policy="uniform", seed=seed)
        records, result, _ = run(tifl, grid)
        return selections(records), result.arrays["w"].numpy().tolist()

    assert picked(1, 0) == picked(1, 2)
    assert picked(1, 0) != picked(2, 0)


@pytest.mark.parametrize(
    "make",
    [
        flower.FedAdagrad,
        flower.FedAdam,
        flower.FedYogi,
        lambda: flower.FedAvgM(server_momentum=0.9),
        lambda: flower.FedProx(proximal_mu=0.1),
        flower.FedMedian,
        flower.FedTrimmedAvg,
        flower.Krum,
        lambda: flower.MultiKrum(num_nodes_to_select=2),
        flower.Bulyan,
        lambda: flower.QFedAvg(client_learning_rate=0.1, train_loss_key="train-loss"),
        lambda: Wrapper(flower.FedAdam()),
        lambda: flower.DifferentialPrivacyServerSideFixedClipping(flower.FedAvg(), 0.01, 1.0, 3),
        lambda: flower.DifferentialPrivacyClientSideFixedClipping(flower.FedAvg(), 0.01, 1.0, 3),
        lambda: flower.DifferentialPrivacyServerSideAdaptiveClipping(flower.FedAvg(), 0.1, 3),
    ],
)
def test_wraps_every_strategy_that_derives_from_fedavg(make):
    arrays = toy_arrays(buffer=False)
    faults = [Fault(4, "errs", 3, 3), Fault(5, "garbage", 2, 2)]
    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 20), faults=faults)
    records, result, _ = run(TiFL(make(), 3, policy="uniform"), grid, num_rounds=5, arrays=arrays)
    assert all(len(names) == 3 for names in selections(records))
    assert np.isfinite(result.arrays["w"].numpy()).all()


def test_works_inside_flowers_own_wrapper():
    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 20))
    tifl = TiFL(flower.FedAvg(**QUIET), 3, policy="uniform")
    outer = flower.DifferentialPrivacyServerSideFixedClipping(tifl, 0.01, 1.0, 3)
    result = outer.start(grid, toy_arrays(buffer=False), num_rounds=3)
    assert np.isfinite(result.arrays["w"].numpy()).all()
    assert tifl.table.num_tiers == 5


def test_state_continues_as_if_uninterrupted():
    def make(seed=0):
        return TiFL(flower.FedAvg(**QUIET), 2, interval=3, credits=4, seed=seed)

    def grid():
        return LocalGrid(toy_app(), profiles=named_fleet("paper-5", 20))

    def go(tifl, fleet, rounds):
        chosen = []
        for server_round in rounds:
            messages = tifl.configure_train(server_round, toy_arrays(), ConfigRecord(), fleet)
            tifl.aggregate_train(server_round, fleet.send_and_receive(messages))
            messages = tifl.configure_evaluate(server_round, toy_arrays(), ConfigRecord(), fleet)
            tifl.aggregate_evaluate(server_round, fleet.send_and_receive(messages))
            chosen.append(sorted(map(tifl.identity, tifl.selected)))
        return chosen

    whole = go(make(), grid(), range(1, 13))
    first = make()
    fleet = grid()
    begun = go(first, fleet, range(1, 6))
    second = make(seed=99)
    second.load_state_dict(first.state_dict())
    second.session.registry = first.session.registry
    assert begun + go(second, fleet, range(6, 13)) == whole


def test_privacy_report_is_for_static_policies():
    tifl = TiFL(flower.FedAvg(**QUIET), 2, policy="random")
    run(tifl, num_rounds=0)
    assert "q_max = 0.35" in tifl.privacy_report()  # 0.7 * 2 / 4
    adaptive = TiFL(flower.FedAvg(**QUIET), 2)
    run(adaptive, num_rounds=0)
    with pytest.raises(ValueError, match="policy must be static"):
        adaptive.privacy_report()


# --- bad input -----------------------------------------------------------------------


class FakeAccountant:
    class config:
        sampling_method = None


def accounted(num_sampled_clients):
    inner = flower.DifferentialPrivacyServerSideFixedClipping(
        flower.FedAvg(), 0.1, 1.0, num_sampled_clients
    )
    inner.accountant = FakeAccountant()
    return inner


BAD = {
    "num_tiers": {"num_tiers": 0},
    "num_tiers must": {"num_tiers": 2.5},
    "interval must be a whole number": {"interval": 2.5},
    "warmup_rounds must be a whole number": {"warmup_rounds": 0.5},
    "wait_s must be at least 0, got nan": {"wait_s": float("nan")},
    "wait_s must be at least 0, got -1": {"wait_s": -1},
    "seed must be a whole number of at least 0": {"seed": -1},
    "clients_per_round": {"clients_per_round": 0},
    "policy must be one of": {"policy": "warp"},
    "policy must sum to 1": {"policy": [0.5, 0.6], "num_tiers": 2},
    "policy must have num_tiers=5": {"policy": [0.5, 0.5]},
    "policy must hold finite": {"policy": [-0.5, 1.5], "num_tiers": 2},
    "start_policy|policy must be one of": {"start_policy": "warp"},
    "credits must": {"credits": -1},
    "credits must have": {"credits": [1, 2]},
    "credits must be equal": {"credits": "some"},
    "on_exhausted": {"on_exhausted": "panic"},
    "on_small_tier": {"on_small_tier": "panic"},
    "t_max must be positive": {"t_max": 0},
    "t_max": {"t_max": float("nan")},
    "tiering": {"tiering": "kmeans"},
    "sync_rounds": {"sync_rounds": 0},
    "warmup_rounds": {"warmup_rounds": -1},
    "profile_interval": {"profile_interval": 0},
    "interval must": {"interval": 0},
    "trigger": {"trigger": "now"},
    "rule": {"rule": "best"},
    "exponent": {"exponent": -1.0},
    "evaluate_per_tier": {"evaluate_per_tier": 0},
    "max_failures": {"max_failures": 0},
    "FedAvg.fraction_train must be 1.0": {"strategy": flower.FedAvg(fraction_train=0.1)},
    "FedAvg.min_train_nodes": {"strategy": flower.FedAvg(min_train_nodes=10)},
    "FedAdam.min_available_nodes": {"strategy": flower.FedAdam(min_available_nodes=50)},
    "FedAvg.min_evaluate_nodes": {"strategy": flower.FedAvg(min_evaluate_nodes=6)},
    "derive from FedAvg": {"strategy": flower.FedXgbCyclic()},
    "num_sampled_clients": {"strategy": accounted(3), "on_small_tier": "skip"},
    "borrow or skip": {"strategy": accounted(5)},
}


@pytest.mark.parametrize("message", sorted(BAD))
def test_bad_input_is_refused_at_construction(message):
    with pytest.raises(ValueError, match=message):
        TiFL(**BAD[message])


def test_more_tiers_than_nodes_is_refused_before_training():
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile()] * 3)
    with pytest.raises(ValueError, match="num_tiers must be at most the number of nodes, 3, got 5"):
        run(TiFL(), grid)

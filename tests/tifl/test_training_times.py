"""Nodes that are timed while they train."""

from dataclasses import replace

import numpy as np
import pytest
from flwr.serverapp import strategy as flower
from recording import Folder, KilledError, evaluate, killed_and_resumed
from tifl_toy import Answers, paper_grid, records_of
from toy import toy_app, toy_arrays

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid, named_fleet
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.contract import MissingHelpError
from flwr_hetero.server.profiling import identify_nodes
from flwr_hetero.strategy import BiasedLocalSGD, OverSelect, Recorded, TiFL, Wrapper
from flwr_hetero.tifl import training_times

SPEEDS = (4.0, 2.0, 1.0, 0.5, 0.1)


def make(inner=None, clients_per_round=3, num_tiers=5, **settings):
    inner = inner or flower.FedAvg(fraction_evaluate=0.0)
    return TiFL(inner, clients_per_round, num_tiers, **{"policy": "uniform", **settings})


class Log(Wrapper):
    """Keep instructions as they are sent: round, node, kind."""

    def __init__(self, inner):
        super().__init__(inner)
        self.sent = []

    def on_instructions(self, context, messages, grid):
        self.sent += [(context.round, m.metadata.dst_node_id) for m in messages]
        return messages


# --- the first rounds ------------------------------------------------------------------


def test_round_1_asks_all_and_takes_the_first_replies():
    log = Log(make())
    records = records_of(log, num_rounds=1)
    assert sorted(node for _, node in log.sent) == list(range(1000, 1020))
    assert sorted(records[1]["latency"]) == ["node-0", "node-1", "node-2"]
    assert records[1]["virtual_s"] == pytest.approx(0.25)
    assert records[1]["failures"] == []
    assert sorted(records[1]["selected"]) == sorted(records[1]["latency"])  # others are at work
    assert records[1]["tifl"]["tier"] is None


@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_tiers_are_those_of_the_phase_as_soon_as_nodes_have_answered(jitter):
    def tiers_by(profiling, num_rounds):
        fleet = [replace(device, jitter=jitter) for device in named_fleet("paper-5", 20)]
        tifl = make(profiling=profiling)
        records = records_of(tifl, LocalGrid(toy_app(), fleet), num_rounds)
        known = [record["tifl"].get("tiers") for record in records]
        return list(filter(None, known)), records

    (phase,), before = tiers_by("phase", 1)
    forming, records = tiers_by("training", 40)
    assert [len(tiers) for tiers in forming[:2]] < [20, 20]
    wrong = [sum(phase[node] != tier for node, tier in tiers.items()) for tiers in forming]
    assert max(wrong) <= 4 * bool(jitter)
    assert len(forming[-1]) == 20
    assert records[5]["virtual_s"] < before[0]["virtual_s"] / 4


def test_no_node_has_two_jobs():
    """Not for evaluation either."""
    grid = LocalGrid(toy_app(), named_fleet("paper-5", 20))
    busy_until, twice = {}, []

    class Watch(Wrapper):
        def note(self, messages):
            now_s = self.fleet.clock.virtual_s
            for message in messages:
                node = message.metadata.dst_node_id
                twice.extend([node] * (busy_until.get(node, 0.0) > now_s + 1e-6))
                if message.metadata.message_type == "train":
                    busy_until[node] = now_s + 1 / SPEEDS[(node - 1000) // 4]

        def on_instructions(self, context, messages, grid):
            self.note(messages)
            return messages

        def configure_evaluate(self, *args):
            messages = super().configure_evaluate(*args)
            self.note(messages)
            return messages

    Watch(make(flower.FedAvg())).start(grid, toy_arrays(), 12)
    assert busy_until.keys() == set(range(1000, 1020))
    assert twice == []


def test_first_replies_that_came_late_count_for_nothing_but_time():
    """The model is that of the nodes of the history, though all have answered."""
    log = Log(make())
    records = records_of(log, num_rounds=3)
    counted = [name for record in records[1:] for name in record["latency"]]
    assert len(log.sent) > len(counted)
    assert all(len(record["latency"]) <= 3 for record in records[1:])
    assert all(record["failures"] == [] for record in records)


def test_credits_begin_when_all_nodes_have_a_tier():
    records = records_of(make(policy="paced"), num_rounds=40)
    last = max(i for i, r in enumerate(records) if "tiers" in r["tifl"])
    after = [record["tifl"]["tier"] for record in records[last:]]
    assert records[last]["tifl"]["num_tiers"] == 5
    spent = np.bincount(after[:31], minlength=5)
    assert (spent <= [16, 8, 4, 2, 1]).all()
    assert sum(records[last]["tifl"]["credits"]) == 31 - 1


def test_waits_where_only_slow_nodes_are_left():
    grid = Answers(3)
    tifl = make(clients_per_round=1, num_tiers=1)

    def leave(server_round, arrays):
        if server_round == 1:
            grid.leave(1002)  # the fastest, which alone has answered

    records = records_of(tifl, grid, 3, evaluate_fn=leave)
    assert all(record["latency"] for record in records[1:])
    assert records[2]["virtual_s"] == pytest.approx(1 / 2 + 1 / 2)


def test_large_fleets_are_timed_some_at_a_time(monkeypatch):
    monkeypatch.setattr(training_times, "AT_ONCE", 8)
    log = Log(make())
    records_of(log, num_rounds=60)
    first = dict(reversed([(node, server_round) for server_round, node in log.sent]))
    by_round = np.bincount(list(first.values()))
    assert by_round.max() == by_round[1] == 8
    assert by_round.sum() == 20
    assert len(log.inner.tiers.tier) == 20


# --- afterwards ------------------------------------------------------------------------


def test_shares_hold_though_tiers_are_formed_again():
    """Every 10 rounds they are, of the same nodes."""
    records = records_of(make(policy="adaptive", interval=1000), num_rounds=140)
    tiers = [record["tifl"]["tier"] for record in records[41:]]
    probs = records[-1]["tifl"]["tier_probs"]
    assert np.bincount(tiers, minlength=5) == pytest.approx(100 * np.array(probs), abs=3)


def test_node_that_slows_down_changes_its_tier():
    grid, tifl = paper_grid(10), make(clients_per_round=2, policy=[1, 0, 0, 0, 0])

    def throttle(server_round, arrays):
        if server_round == 50:
            grid.set_profile(1000, DeviceProfile(0.05))

    records = records_of(tifl, grid, 90, evaluate_fn=throttle)
    tiers = [record["tifl"]["tiers"] for record in records if "tiers" in record["tifl"]]
    assert tiers[-1]["node-0"] == 4
    assert [record["round"] for record in records if "tiers" in record["tifl"]][-1] <= 70
    assert len(tiers) < 9  # unchanged ones are not told again


def test_late_joiner_and_returning_node_train_beside_others():
    grid, tifl = paper_grid(), make()

    def come(server_round, arrays):
        if server_round == 45:
            grid.join(DeviceProfile(1.1))
            grid.leave(1003)

    records = records_of(tifl, grid, 80, evaluate_fn=come)
    assert tifl.tiers.tier["node-20"] == 2
    assert any("node-20" in record["selected"] for record in records)
    assert not any(record["failures"] for record in records)


@pytest.mark.parametrize("fault", ["errs", "dies"])
def test_node_that_never_answers_is_given_up(fault, caplog):
    grid = Answers(4, faults=[Fault(0, fault)])
    tifl = make(clients_per_round=2, num_tiers=2, t_max=5.0, max_failures=2)
    records = records_of(tifl, grid, 60)
    assert {"node-1", "node-2", "node-3"} <= tifl.tiers.tier.keys()
    assert grid.count(0, "train") == {"errs": 2 + 5, "dies": 2 + 1}[fault]  # every tenth round
    assert records[-1]["tifl"]["still_at_work"] == 0
    assert caplog.text.count("failed 2 times in a row") == 1


def test_slower_than_t_max_is_a_dropout():
    records = records_of(make(t_max=5.0), num_rounds=60)
    told = [record["tifl"] for record in records if "tiers" in record["tifl"]]
    assert len(told[-1]["tiers"]) == 16


def test_dropouts_are_timed_again_with_an_interval():
    grid = paper_grid(10)

    def faster(server_round, arrays):
        if server_round == 10:
            grid.set_profile(1008, DeviceProfile(1.0))

    tifl = make(clients_per_round=2, t_max=5.0, profile_interval=20)
    records_of(tifl, grid, 60, evaluate_fn=faster)
    assert tifl.tiers.tier["node-8"] == 2
    assert "node-9" not in tifl.tiers.tier


def test_a_newcomer_to_a_large_fleet_has_its_tier_at_once():
    """One in 40 is too few for new tiers."""
    grid, tifl = paper_grid(40), make()

    def come(server_round, arrays):
        if server_round == 59:
            grid.join(DeviceProfile(4.0))

    records = records_of(tifl, grid, 75, evaluate_fn=come)
    assert tifl.tiers.tier["node-40"] == 0
    assert not any("tiers" in record["tifl"] for record in records[60:])


def test_late_replies_teach_the_steps_too():
    seen = []

    class Learns(Wrapper):
        def on_profile_replies(self, context, replies):
            for reply in replies:
                seen.append(
                    (self.identity(reply.metadata.src_node_id), self.seconds(context, reply))
                )

        def seconds(self, context, reply):
            return context.latency_of(reply).seconds

    make(Learns(flower.FedAvg(fraction_evaluate=0.0))).start(paper_grid(10), toy_arrays(), 40)
    assert len(seen) == 10 - 3 - 1  # but those that counted in round 1, and one as fast
    assert ("node-9", 10.0) in seen


def test_equal_nodes_are_one_tier_and_said_so(caplog):
    fleet = [DeviceProfile(jitter=0.2)] * 10
    tifl = make(clients_per_round=2)
    records_of(tifl, LocalGrid(toy_app(), fleet), 30)
    assert set(tifl.tiers.tier.values()) == {0}
    assert "one tier: latencies" in caplog.text
    assert "differ by noise only" in caplog.text


def test_small_tiers_are_said_at_the_start(caplog):
    records_of(make(clients_per_round=5), paper_grid(10), 0)
    assert (
        "tiers of about 2 nodes are smaller than clients_per_round=5: "
        "give num_tiers=2 or on_small_tier='borrow'" in caplog.text
    )


# --- compositions, resume ----------------------------------------------------------------


def test_nodes_are_timed_at_the_work_of_the_composition():
    def sees(message, context, call_next):
        if message.metadata.message_type == "train":
            asked.append(message.content["config"][keys.NUM_STEPS])
        return call_next(message, context)

    asked = []
    strategy = BiasedLocalSGD(make(), fast_steps=6, gamma=1.0, on_missing="warn")
    strategy.start(paper_grid(app=toy_app(mods=[sees])), toy_arrays(), 1)
    assert asked == [6] * 20


def test_identities_are_not_asked_of_nodes_at_work():
    tifl, grid = make(clients_per_round=1, num_tiers=1), Answers(3)
    tifl.start(grid, toy_arrays(), 1)
    grid.asked.clear()
    assert tifl.fleet.nodes.in_flight.keys() == {1000, 1001}
    identify_nodes(tifl, Exchange(tifl.fleet), grid, 9.0)
    assert grid.asked == []


def test_over_select_has_a_waiting_rule_of_its_own():
    rule = "time nodes before the first round inside OverSelect, got 'TiFL': give it profiling="
    with pytest.raises(ValueError, match=f"strategy must {rule}'phase'"):
        OverSelect(Wrapper(TiFL()), take=2)
    OverSelect(Wrapper(TiFL(profiling="phase")), take=2)


def go(folder, evaluate_fn, resume):
    fleet = [DeviceProfile(1.0 + i, jitter=0.1) for i in range(6)]
    tifl = make(clients_per_round=2, num_tiers=2, policy="adaptive", interval=3)
    strategy = Recorded(tifl, run_dir=folder, resume=resume)
    return strategy.start(LocalGrid(toy_app(), fleet), toy_arrays(), 25, evaluate_fn=evaluate_fn)


def test_killed_and_resumed_equals_unbroken_once_all_have_answered(tmp_path):
    killed_and_resumed(go, tmp_path, killed_in=14)


def test_first_work_that_was_open_is_asked_for_again(tmp_path, caplog):
    folder = Folder(tmp_path / "run")
    with pytest.raises(KilledError):
        go(folder, evaluate(2), resume=False)
    assert len(folder.records[1]["latency"]) == 2
    caplog.clear()
    go(folder, None, resume=True)
    assert folder.records[2]["tifl"]["still_at_work"] > 0
    assert "TiFL: 4 nodes are timed in this round" in caplog.text
    tiers = [record["tifl"]["tiers"] for record in folder.records if "tiers" in record["tifl"]]
    assert len(tiers[-1]) == 6


# --- evaluation --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "minimum", "count"), [(1.0, 2, 20), (0.25, 2, 5), (0.01, 3, 3)]
)
def test_evaluation_covers_the_nodes_that_flower_would_ask(fraction, minimum, count):
    inner = flower.FedAvg(fraction_evaluate=fraction, min_evaluate_nodes=minimum)
    grid = Answers(20)
    make(inner).start(grid, toy_arrays(), 40)
    asked = [kind for _, kind in grid.asked]
    rounds = "".join("e" if kind == "evaluate" else "t" for kind in asked).split("t")
    assert len(rounds[-1]) == count
    assert max(map(len, rounds)) == count


def test_nodes_at_work_are_not_evaluated():
    grid = Answers(20)
    make(flower.FedAvg()).start(grid, toy_arrays(), 1)
    assert {node for node, kind in grid.asked if kind == "evaluate"} == {19, 18, 17}


def test_nodes_left_out_by_flower_are_asked_for_tifl_alone():
    """The app's curve is that of the nodes that Flower asked."""
    inner = flower.FedAvg(fraction_evaluate=0.01, min_evaluate_nodes=1)
    grid, seen = Answers(20), []
    tifl = make(inner, policy="adaptive", interval=20, profiling="phase")

    def mean(records, key):
        seen.append(len(records))
        return records[0].metric_records["metrics"]

    inner.evaluate_metrics_aggr_fn = mean
    records = records_of(tifl, grid, 20)
    asked = [kind for _, kind in grid.asked].count("evaluate")
    assert seen == [1] * 20
    assert asked == 20 + 19
    assert None not in records[20]["tifl"]["tier_accuracy"]
    assert records[19]["tifl"]["tier_accuracy"] == [None] * 5


# --- Flower's simulation, which waits for all replies --------------------------------------


class InMemoryGrid:
    """Flower's simulation, as a strategy sees it; nodes report their time, or do not."""

    def __init__(self, grid, report=True):
        self.grid, self.report = grid, report

    def __getattr__(self, name):
        if name == "virtual_time_s":
            raise AttributeError(name)
        return getattr(self.grid, name)

    def pull_messages(self, message_ids):
        replies = self.grid.wait_for(message_ids)
        for reply in replies if not self.report else ():
            del reply.content[keys.TIMING]
        return replies


def test_simulation_of_emulated_devices_goes_as_local_grid_does():
    def run(wrap):
        fleet = [DeviceProfile(speed, jitter=0.1) for speed in (8, 4, 2, 1, 0.5, 0.25)]
        records = records_of(make(clients_per_round=2), wrap(LocalGrid(toy_app(), fleet)), 25)
        return [(r["latency"], r["weights"], r["tifl"].get("tiers")) for r in records], [
            record["virtual_s"] for record in records
        ]

    rounds, times = run(InMemoryGrid)
    expected, expected_times = run(lambda grid: grid)
    assert rounds == expected
    assert times == pytest.approx(expected_times, abs=1e-7)


@pytest.mark.parametrize("profiling", ["training", "phase"])
def test_simulated_nodes_that_report_no_time_end_the_run(profiling):
    tifl = make(profiling=profiling, clients_per_round=3)
    with pytest.raises(MissingHelpError, match="TiFL: no node reports 'flwr-hetero") as stop:
        tifl.start(InMemoryGrid(paper_grid(10), report=False), toy_arrays(), 12)
    assert "app = ClientApp(mods=[hetero])\nor set num_tiers=1 of TiFL." in str(stop.value)


@pytest.mark.parametrize("profiling", ["training", "phase"])
def test_simulated_nodes_that_report_no_time_are_one_tier(profiling, caplog):
    tifl = make(profiling=profiling, clients_per_round=2)
    tifl.on_missing = "warn"
    tifl.start(InMemoryGrid(paper_grid(10), report=False), toy_arrays(), 12)
    assert set(tifl.tiers.tier.values()) == {0}
    assert len(tifl.tiers.tier) == 10
    assert caplog.text.count("one tier: in a simulation nodes must report their time") == 1
    assert "expected" not in caplog.text
    assert "rounds take" not in caplog.text


@pytest.mark.parametrize("settings", [{"policy": "vanilla"}, {"num_tiers": 1}])
def test_without_tiers_no_node_need_report_its_time(settings):
    tifl = make(clients_per_round=3, **settings)
    tifl.start(InMemoryGrid(paper_grid(10), report=False), toy_arrays(), 2)
    assert len(tifl.tiers.tier) == 10

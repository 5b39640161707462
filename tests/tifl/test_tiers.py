"""Tiers by hand; timing nodes in training and in the phase; nodes that come, go and fail."""

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import MetricRecord
from flwr.serverapp import strategy as flower
from hypothesis import given
from hypothesis import strategies as st
from quadratics import Watched, start
from recording import killed_and_resumed
from tifl_toy import PROFILE, Answers, make_tifl, paper_grid, records_of
from toy import InMemoryGrid, toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid, named_fleet
from flwr_hetero.server.client_support import MissingClientSupportError
from flwr_hetero.strategy import Recorded, TiFL, Wrapper
from flwr_hetero.tifl.algorithm import policy_probs
from flwr_hetero.tifl.tiers import (
    T_MAX,
    Tiers,
    accuracy_of,
    form_tiers,
    paper_estimate,
    place,
    quantile_tiers,
    speeds_differ,
)

NAN, INF = float("nan"), float("inf")
PAPER_LATENCY = 1 / np.repeat([4.0, 2.0, 1.0, 0.5, 0.1], 10)
latencies = st.lists(
    st.one_of(st.floats(0, 1e6), st.sampled_from([1.0, 2.0, 3.0])), min_size=1
).map(np.array)


@pytest.mark.parametrize(
    ("seconds", "num_tiers", "sizes"),
    [
        (PAPER_LATENCY, 5, [10] * 5),
        ([1] * 8 + [2, 3], 3, [8, 1, 1]),
        ([3, 3], 5, [2]),
        ([1, 2, 3, 4, 5, 6, 7], 3, [2, 2, 3]),
        ([1, 2, 2, 2, 3, 4, 5, 6], 3, [4, 2, 2]),
    ],
)
def test_sizes_are_even_but_for_ties(seconds, num_tiers, sizes):
    shuffled = np.random.default_rng(0).permutation(np.array(seconds, float))
    boundaries, _ = quantile_tiers(shuffled, num_tiers)
    assert np.bincount(place(shuffled, boundaries)).tolist() == sizes


@given(latencies, st.integers(1, 8))
def test_tiers_are_ordered_and_complete(seconds, num_tiers):
    boundaries, median = quantile_tiers(np.append(seconds, NAN), num_tiers)
    tier = place(seconds, boundaries)
    sizes = np.bincount(tier)
    assert sizes.min() >= 1
    assert len(sizes) == len(median) == len(boundaries) + 1 == min(num_tiers, len(set(seconds)))
    assert np.ptp(sizes) <= 1 or len(set(seconds)) < len(seconds)
    for j in range(len(median)):
        assert median[j] == np.median(seconds[tier == j])
        assert j == 0 or seconds[tier < j].max() < seconds[tier >= j].min()


@pytest.mark.parametrize("fast", [1.0, np.nextafter(1.0, 2.0)])  # halves round up and down
def test_neighbouring_floats_are_separated(fast):
    seconds = np.array([np.nextafter(fast, 2.0), fast])
    assert place(seconds, quantile_tiers(seconds, 2)[0]).tolist() == [1, 0]


def test_dropouts_have_timed_out_every_time():
    rounds = np.array(
        [[12, T_MAX, 9.9, NAN, T_MAX], [1, 700, 9.9, NAN, 10], [2, 999, 9.8, 3, T_MAX]]
    )
    tiers = form_tiers(list("abcde"), rounds, 3)
    assert tiers.latency == {"a": 2.0, "b": T_MAX, "c": 9.9, "d": 3.0, "e": T_MAX}
    assert tiers.tier == {"a": 0, "d": 1, "c": 2, "e": 2}
    assert tiers.why_so_few == ""
    assert form_tiers(["b"], rounds[:, [1]], 3) is None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("speeds", "differ"),
    [(np.ones(10), False), (np.linspace(1, 1.2, 10), False), (np.linspace(1, 3, 10), True)],
)
def test_latencies_differ_by_more_than_their_spread(seed, speeds, differ):
    rounds = speeds * np.exp(0.2 * np.random.default_rng(seed).standard_normal((5, 10)))
    assert speeds_differ(rounds) == differ
    tiers = form_tiers([f"{i}" for i in range(10)], rounds, 3)
    rounds[np.random.default_rng(seed).random(rounds.shape) < 0.4] = NAN
    assert speeds_differ(rounds) == differ
    assert len(tiers.seconds) == (3 if differ else 1)
    assert tiers.why_so_few.endswith("differ by noise only") == (not differ)


def test_variance_components_by_hand():
    logs = np.array([[0.0, 1.0, 2.0], [1.0, 2.0, 3.0], [2.0, 3.0, 4.0]])
    assert not speeds_differ(np.exp(logs))  # between (3 * 1 - 1) / 3, within 1
    logs[:, 1:] += [0.25, 0.5]
    assert speeds_differ(np.exp(logs))  # between 1.25^2 - 1 / 3
    assert not speeds_differ(np.full((3, 2), NAN))
    assert not speeds_differ(np.array([[1.0, NAN], [9.0, NAN]]))  # one node


@pytest.mark.parametrize(("policy", "seconds"), [("slow", 46242), ("fast", 1837)])
def test_paper_estimate_on_table_2(policy, seconds):
    """The outer tiers' latencies follow from "slow" and "fast" in 500 rounds."""
    latency = np.array([1837 / 500, 9, 9, 9, 46242 / 500])
    assert paper_estimate(latency, policy_probs(policy, 5), 500) == pytest.approx(seconds)


def test_accuracy_is_weighted_by_examples(caplog):
    reported = {
        "node-0": MetricRecord({"acc": 0.5, "n": 30}),
        "node-1": MetricRecord({"acc": 0.9, "n": 10}),
        "node-8": MetricRecord({"acc": 0.2, "n": 10}),
        "node-9": MetricRecord({"acc": 1.0, "n": 10}),  # a dropout
    }
    tier = {f"node-{i}": i // 3 for i in range(9)}
    tiers = Tiers({}, tier, [3.5, 6.5], [2.0, 5.0, 8.0])
    accuracy = tiers.accuracy(reported, "n")
    np.testing.assert_allclose(accuracy, [0.6, np.nan, 0.2])
    assert caplog.text == ""
    unknown = {"node-0": MetricRecord({"f1": 0.5, "n": 30})}
    assert np.isnan(tiers.accuracy(unknown, "n")).all()
    assert "metrics ['f1', 'n'] has 'acc' or 'loss' in its name" in caplog.text


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"loss": 2.0, "eval-Acc": 0.5}, 0.5),
        ({"eval-loss": 2.0}, -2.0),
        ({"f1": 0.3}, np.nan),
        ({"acc": float("inf")}, np.nan),
    ],
)
def test_accuracy_of(metrics, expected):
    assert accuracy_of(MetricRecord(metrics)) == pytest.approx(expected, nan_ok=True)


SPEEDS = (4.0, 2.0, 1.0, 0.5, 0.1)
TRAIN_ONLY = {"fraction_evaluate": 0.0}


def in_training(inner=None, clients_per_round=3, num_tiers=5, **settings):
    inner = inner or flower.FedAvg(**TRAIN_ONLY)
    return TiFL(inner, clients_per_round, num_tiers, **{"policy": "uniform", **settings})


def at(number, act):
    """Make an ``evaluate_fn`` that acts after a round."""

    def note(server_round, arrays):
        if server_round == number:
            act()

    return note


class Log(Wrapper):
    """Keep instructions as they are sent: round and node; and what late replies teach."""

    def __init__(self, inner):
        super().__init__(inner)
        self.sent = []
        self.late = []

    def on_instructions(self, context, messages, grid):
        self.sent += [(context.round, m.metadata.dst_node_id) for m in messages]
        return messages

    def on_profile_replies(self, context, replies):
        for reply in replies:
            name = context.identity(reply.metadata.src_node_id)
            self.late.append((name, context.latency_of(reply).seconds))


def test_round_1_asks_all_and_takes_the_first_replies():
    """The others count for nothing but time; credits begin when all nodes have a tier."""
    log = Log(flower.FedAvg(**TRAIN_ONLY))
    records = records_of(in_training(log, policy="paced"), num_rounds=40)
    assert sorted(node for _, node in log.sent[:20]) == list(range(1000, 1020))
    assert sorted(records[1]["latency"]) == ["node-0", "node-1", "node-2"]
    assert records[1]["virtual_s"] == pytest.approx(0.25)
    assert sorted(records[1]["selected"]) == sorted(records[1]["latency"])  # others are in flight
    assert (records[1]["tifl"]["tier"], records[1]["tifl"]["in_flight"]) == (None, 16)
    assert all(len(record["latency"]) <= 3 for record in records[1:])
    assert not any(record["failures"] for record in records)
    assert len(log.late) == 20 - 3 - 1  # but those that counted in round 1, and one as fast
    assert ("node-19", 10.0) in log.late
    last = max(i for i, r in enumerate(records) if "tiers" in r["tifl"])
    after = [record["tifl"]["tier"] for record in records[last:]]
    assert (np.bincount(after[:31], minlength=5) <= [16, 8, 4, 2, 1]).all()
    assert sum(records[last]["tifl"]["credits"]) == 31 - 1


@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_tiers_are_those_of_the_phase_as_soon_as_nodes_have_answered(jitter):
    def tiers_by(profiling, num_rounds):
        fleet = [replace(device, jitter=jitter) for device in named_fleet("paper-5", 20)]
        tifl = in_training(profiling=profiling)
        records = records_of(tifl, LocalGrid(toy_app(), fleet), num_rounds)
        return [r["tifl"]["tiers"] for r in records if "tiers" in r["tifl"]], records

    (phase,), before = tiers_by("phase", 1)
    forming, records = tiers_by("training", 40)
    assert [len(tiers) for tiers in forming[:2]] < [20, 20]
    wrong = [sum(phase[node] != tier for node, tier in tiers.items()) for tiers in forming]
    assert max(wrong) <= 4 * bool(jitter)
    assert len(forming[-1]) == 20
    told = [r["tifl"]["latency"] for r in records if "tiers" in r["tifl"]][-1]
    ratios = [told[f"node-{i}"] * SPEEDS[i // 4] for i in range(20)]
    assert ratios == pytest.approx([1.0] * 20, rel=4 * jitter + 1e-6)
    assert records[5]["virtual_s"] < before[0]["virtual_s"] / 4


def test_no_node_has_two_jobs():
    """Not for evaluation either."""
    grid = Watched(range(20), np.repeat(SPEEDS, 4))  # fails if one at work is sent something
    in_training(flower.FedAvg()).start(grid, start(), 12)
    assert {node for _, node, kind, _ in grid.sent if kind == "train"} == set(range(20))
    assert {kind for _, _, kind, _ in grid.sent} == {"train", "evaluate"}


def test_node_that_slows_down_changes_its_tier():
    grid = paper_grid(10)
    tifl = in_training(None, 2, policy=[1, 0, 0, 0, 0])
    throttle = at(50, lambda: grid.set_profile(1000, DeviceProfile(0.05)))
    records = records_of(tifl, grid, 90, evaluate_fn=throttle)
    told = {r["round"]: r["tifl"]["tiers"] for r in records if "tiers" in r["tifl"]}
    assert told[max(told)]["node-0"] == 4
    assert max(told) <= 70
    assert len(told) < 9  # unchanged ones are not told again


@pytest.mark.parametrize(
    ("size", "speed", "tier"), [(20, 1.1, 2), pytest.param(40, 4.0, 0, marks=pytest.mark.nightly)]
)
def test_late_joiner_trains_beside_others(size, speed, tier):
    """In a large fleet one is too few for new tiers."""
    grid = paper_grid(size)
    tifl = in_training()
    come = at(59, lambda: grid.join(DeviceProfile(speed)) and grid.leave(1003))
    records = records_of(tifl, grid, 90, evaluate_fn=come)
    assert tifl.tiers.tier[f"node-{size}"] == tier
    assert any(f"node-{size}" in record["selected"] for record in records)
    assert not any(record["failures"] for record in records)
    assert size == 20 or not any("tiers" in record["tifl"] for record in records[61:])


@pytest.mark.parametrize("case", ["errs", "dies", "slow", "faster later"])
def test_a_node_without_an_answer_is_given_up(case, caplog):
    """Until tiers are formed again; nodes take 100 s, 50 s, ..., so that T_max is over some day."""
    faults = [Fault(0, case)] if case in ("errs", "dies") else []
    grid = Answers(4, faults=faults)
    tifl = in_training(None, 1, 3, policy="slow")
    for i in range(4):
        grid.set_profile(1000 + i, DeviceProfile((1 + i) / 100))
    if not faults:
        grid.set_profile(1000, DeviceProfile(0.5 / T_MAX))
    faster = at(30, lambda: case == "faster later" and grid.set_profile(1000, DeviceProfile(0.009)))
    records = records_of(tifl, grid, 110 if case == "faster later" else 70, evaluate_fn=faster)
    assert {"node-1", "node-2", "node-3"} <= tifl.tiers.tier.keys()
    assert tifl.tiers.tier.get("node-0") == (2 if case == "faster later" else None)
    # three times, then every tenth round, or as often as T_max is over
    most = {"errs": 3 + 6, "dies": 3 + 3, "slow": 3 + 3, "faster later": 70}[case]
    assert 3 <= grid.count(0, "train") <= most
    assert records[-1]["tifl"]["in_flight"] <= 1
    said = [r for r in caplog.records if "id-1000: failed 3 times in a row" in r.getMessage()]
    assert [r.levelname for r in said][:1] == ["WARNING"] * (case != "faster later" or bool(said))


def test_a_phase_without_an_answer(caplog):
    """An error at first; later the tiers stay."""

    def dying(server_round):
        how = {"first_round": server_round, "last_round": server_round, "message_type": PROFILE}
        return Answers(4, faults=[Fault(i, "dies", **how) for i in range(4)])

    with pytest.raises(RuntimeError, match="no node answered the profiling within 600 s"):
        records_of(make_tifl(), dying(1))
    tifl = make_tifl(profile_interval=2)
    assert all(r["selected"] for r in records_of(tifl, dying(2), 3)[1:])
    assert "the tiers stay as they are" in caplog.text
    assert len(tifl.tiers.tier) == 4


@pytest.mark.parametrize("interval", [None, 8])
def test_a_node_that_kept_failing_tries_again_when_tiers_are_formed(interval):
    """Once if it fails again."""
    faults = [Fault(0, "errs", first_round=5, last_round=24, message_type="train")]
    how = {"policy": "vanilla", "profile_interval": interval}
    records = records_of(in_training(None, 4, 1, **how), Answers(4, faults=faults), 40)
    asked = [number for number, record in enumerate(records) if "node-0" in record["selected"]]
    tried = {None: [12, 22, *range(32, 41)], 8: [10, 18, *range(26, 41)]}[interval]
    assert asked == [*range(1, 8), *tried]


def go(folder, evaluate_fn, resume):
    fleet = [DeviceProfile(1.0 + i, jitter=0.1) for i in range(6)]
    tifl = in_training(None, 2, 2, policy="adaptive", interval=3)
    strategy = Recorded(tifl, run_dir=folder, resume=resume)
    return strategy.start(LocalGrid(toy_app(), fleet), toy_arrays(), 25, evaluate_fn=evaluate_fn)


# in round 15 there are accuracies that no draw has seen
@pytest.mark.parametrize("killed_in", [pytest.param(14, marks=pytest.mark.nightly), 15])
def test_killed_and_resumed_equals_unbroken_once_all_have_answered(killed_in, tmp_path):
    killed_and_resumed(go, tmp_path, killed_in=killed_in)


def test_simulation_of_emulated_devices_goes_as_local_grid_does():
    def run(wrap):
        fleet = [DeviceProfile(speed, jitter=0.1) for speed in (8, 4, 2, 1, 0.5, 0.25)]
        records = records_of(in_training(None, 2), wrap(LocalGrid(toy_app(), fleet)), 25)
        rounds = [(r["latency"], r["weights"], r["tifl"].get("tiers")) for r in records]
        return rounds, [record["virtual_s"] for record in records]

    rounds, times = run(InMemoryGrid)
    expected, expected_times = run(lambda grid: grid)
    assert rounds == expected
    assert times == pytest.approx(expected_times, abs=1e-7)


@pytest.mark.parametrize("profiling", ["training", "phase"])
def test_simulated_nodes_that_report_no_time_end_the_run(profiling, caplog):
    tifl = in_training(profiling=profiling)
    told = "TiFL: no node reports 'flwr-hetero"
    with pytest.raises(MissingClientSupportError, match=told) as stop:
        tifl.start(InMemoryGrid(paper_grid(10), report=False), toy_arrays(), 12)
    assert "app = ClientApp(mods=[hetero])\nor set num_tiers=1 of TiFL." in str(stop.value)
    assert "rounds take" not in caplog.text


@pytest.mark.parametrize("settings", [{"policy": "vanilla"}, {"num_tiers": 1}])
def test_without_tiers_no_node_need_report_its_time(settings):
    tifl = in_training(**settings)
    tifl.start(InMemoryGrid(paper_grid(10), report=False), toy_arrays(), 2)
    assert len(tifl.tiers.tier) == 10


def make_tiers():
    """Three tiers of three nodes, and a dropout."""
    latency = {f"node-{i}": float(i + 1) for i in range(9)}
    tier = {name: i // 3 for i, name in enumerate(latency)}
    return Tiers(latency | {"node-9": 99.0}, tier, [3.5, 6.5], [2.0, 5.0, 8.0])


def test_late_joiner_is_placed_by_the_boundaries():
    tiers = make_tiers()
    placed = [tiers.add(f"node-{20 + i}", s) for i, s in enumerate((0.1, 3.5, 3.6, 50))]
    assert placed == [0, 0, 1, 2]
    assert tiers.members[2] == ["node-6", "node-7", "node-8", "node-23"]
    assert tiers.latency["node-22"] == 3.6
    assert tiers.moved(make_tiers())
    assert not make_tiers().moved(make_tiers())

import numpy as np
import pytest
from flwr.app import MetricRecord
from hypothesis import given
from hypothesis import strategies as st
from oracles.tifl import mean_of_all_draws

from flwr_hetero.tifl.algorithm import policy_probs
from flwr_hetero.tifl.tiers import (
    T_MAX,
    Tiers,
    accuracy_of,
    expected_round_times,
    expected_slowest,
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
    tiers = form_tiers(list("abcde"), rounds, 3, count=1)
    assert tiers.latency == {"a": 2.0, "b": T_MAX, "c": 9.9, "d": 3.0, "e": T_MAX}
    assert tiers.tier == {"a": 0, "d": 1, "c": 2, "e": 2}
    assert tiers.why_so_few == ""
    assert form_tiers(["b"], rounds[:, [1]], 3, count=1) is None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("speeds", "differ"),
    [(np.ones(10), False), (np.linspace(1, 1.2, 10), False), (np.linspace(1, 3, 10), True)],
)
def test_latencies_differ_by_more_than_their_spread(seed, speeds, differ):
    rounds = speeds * np.exp(0.2 * np.random.default_rng(seed).standard_normal((5, 10)))
    assert speeds_differ(rounds) == differ
    tiers = form_tiers([f"{i}" for i in range(10)], rounds, 3, count=1)
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


@pytest.mark.parametrize("num_selected", [1, 2, 4, 7, 9])
@pytest.mark.parametrize("latency", [[3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0], [0.0, 7.0], [2.0]])
def test_expected_slowest_equals_all_draws(latency, num_selected):
    mean = mean_of_all_draws(latency, num_selected)
    assert expected_slowest(np.array(latency), num_selected) == pytest.approx(mean)
    n = 10**6
    c = 10 ** (num_selected - 1) if num_selected < 7 else 10**6 + 1 - num_selected
    exact = c * (n + 1) / (c + 1)  # the expected largest of c numbers drawn from 1..n
    assert expected_slowest(np.arange(1.0, n + 1), c) == pytest.approx(exact, rel=1e-9)


def test_expected_speed_ups_on_the_papers_fleet():
    """Not the paper's "6x for uniform", which its own Table 2 contradicts."""
    (vanilla,) = expected_round_times(PAPER_LATENCY[None], np.zeros(50, int), 5)
    assert vanilla == pytest.approx(7.4446, abs=1e-4)
    times = expected_round_times(PAPER_LATENCY[None], np.repeat(np.arange(5), 10), 5)
    for policy, times_faster in {"uniform": 2.7, "random": 8.0, "fast": 29.8, "slow": 0.74}.items():
        assert vanilla / (policy_probs(policy, 5) @ times) == pytest.approx(times_faster, rel=0.007)


@pytest.mark.parametrize(("policy", "seconds"), [("slow", 46242), ("fast", 1837)])
def test_paper_estimate_on_table_2(policy, seconds):
    """The outer tiers' latencies follow from "slow" and "fast" in 500 rounds."""
    latency = np.array([1837 / 500, 9, 9, 9, 46242 / 500])
    assert paper_estimate(latency, policy_probs(policy, 5), 500) == pytest.approx(seconds)


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


def test_accuracy_is_weighted_by_examples(caplog):
    reported = {
        "node-0": MetricRecord({"acc": 0.5, "n": 30}),
        "node-1": MetricRecord({"acc": 0.9, "n": 10}),
        "node-8": MetricRecord({"acc": 0.2, "n": 10}),
        "node-9": MetricRecord({"acc": 1.0, "n": 10}),  # a dropout
    }
    accuracy = make_tiers().accuracy(reported, "n")
    np.testing.assert_allclose(accuracy, [0.6, np.nan, 0.2])
    assert caplog.text == ""
    unknown = {"node-0": MetricRecord({"f1": 0.5, "n": 30})}
    assert np.isnan(make_tiers().accuracy(unknown, "n")).all()
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

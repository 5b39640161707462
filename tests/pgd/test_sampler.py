"""PGDSampler: the paper's batches, unbiased ones, state and errors."""

import math

import numpy as np
import pytest

from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero.pgd.algorithm import Trend, estimate
from flwr_hetero.pgd.sampler import RULES
from flwr_hetero.sampler import PGDSampler

TOP_RULES = ("topk", "topk-normalised")


def known(sampler: PGDSampler, seed: int = 0) -> np.ndarray:
    """Give every example a priority, a third of them negative."""
    rng = np.random.default_rng(seed)
    priorities = rng.lognormal(size=sampler.num_samples) * rng.choice(
        [1, 1, -1], sampler.num_samples
    )
    sampler.update(np.arange(sampler.num_samples), priorities)
    return priorities


# --- the paper's rules -----------------------------------------------------------------


def test_a_batch_is_those_in_turn_and_those_of_highest_priority() -> None:
    sampler = PGDSampler(20, 6, seed=3, rule="topk", renewal_share=0.5)
    priorities = known(sampler)
    turn = sampler.draw.order.tolist()
    for step in range(20):
        indices, weights = sampler.next_batch()
        expected = [turn[(3 * step + i) % 20] for i in range(3)]
        assert indices[:3].tolist() == expected
        best = [i for i in np.argsort(-priorities).tolist() if i not in expected]
        assert sorted(indices[3:].tolist()) == sorted(best[:3])
        assert weights.tolist() == [1.0] * 6


def test_two_iterations_by_hand() -> None:
    # priorities 8, 4, 2, 1; the second example falls to a quarter and is left out then
    sampler = PGDSampler(4, 2, seed=0, rule="topk", smoothing=1.0)
    sampler.update(np.arange(4), np.array([8.0, 4.0, 2.0, 1.0]))
    sampler.draw.order = np.array([3, 2, 1, 0])
    indices, _ = sampler.next_batch()
    assert indices.tolist() == [3, 0]
    sampler.update(indices, np.array([1.0, 1.0]))  # the first: slope -ln 8
    indices, _ = sampler.next_batch()
    assert indices.tolist() == [2, 1]
    sampler.update(indices, np.array([6.0, -4.0]))  # slopes ln 3 over 2, and none
    estimates = estimate(sampler.draw.trend, 3)
    np.testing.assert_allclose(estimates, [1 / 64, -4.0, 6 * math.sqrt(3), 1.0])


def test_the_top_is_chosen_by_the_extrapolated_priority() -> None:
    sampler = PGDSampler(3, 2, seed=0, rule="topk", smoothing=1.0)
    sampler.draw.order = np.array([2, 0, 1])
    sampler.update(np.arange(3), np.array([9.0, 1.0, 0.0]))
    sampler.update(np.arange(3), np.array([5.0, 4.0, 0.0]))  # next: 25 / 9 and 16
    assert sampler.next_batch()[0].tolist() == [2, 1]


def test_a_batch_drawn_ahead_counts_each_example_as_drawn_last() -> None:
    sampler = PGDSampler(4, 2, seed=0, rule="topk", aggressive=False)
    sampler.draw.order = np.array([3, 0, 1, 2])
    sampler.update(np.arange(4), np.array([9.0, 8.0, 2.0, 1.0]))
    assert [sampler.next_batch()[0].tolist() for _ in range(2)] == [[3, 0], [0, 1]]
    sampler.update(np.array([0, 1]), np.array([50.0, 60.0]))
    assert sampler.draw.trend.priority.tolist() == [50.0, 8.0, 2.0, 1.0]


def test_the_first_epoch_is_taken_in_turn_whole() -> None:
    sampler = PGDSampler(10, 4, seed=0, rule="topk")
    seen = []
    for _ in range(3):
        indices, weights = sampler.next_batch()
        seen += indices.tolist()
        assert weights.tolist() == [1.0] * 4
        sampler.update(indices, np.ones(4))
    assert sorted(seen[:10]) == list(range(10))
    priorities = np.zeros(10)
    priorities[5] = 1e3
    sampler.update(np.arange(10), priorities)
    drawn = [sampler.next_batch()[0] for _ in range(5)]
    assert all(5 in batch for batch in drawn)


def test_an_example_never_reached_waits_for_its_turn() -> None:
    sampler = PGDSampler(6, 2, seed=0, rule="topk")
    for _ in range(3):
        indices, _ = sampler.next_batch()
        if 0 not in indices:
            sampler.update(indices, np.full(2, -1.0))
    assert not sampler.draw.is_warming_up
    top = [sampler.next_batch()[0][1] for _ in range(6)]
    unknown = np.flatnonzero(sampler.draw.trend.computed_at < 0)
    assert 0 in unknown
    assert not set(top) & set(unknown)


def test_the_basic_variant_steps_on_the_top_and_learns_from_the_turn() -> None:
    sampler = PGDSampler(20, 6, seed=1, rule="topk", aggressive=False, renewal_share=1 / 3)
    known(sampler)
    indices, weights = sampler.next_batch()
    assert weights.tolist() == [0.0, 0.0, 1.5, 1.5, 1.5, 1.5]
    before = sampler.draw.trend.priority.copy()
    sampler.update(indices, np.full(6, 77.0))
    changed = np.flatnonzero(sampler.draw.trend.priority != before)
    assert sorted(changed) == sorted(indices[:2])


def test_the_aggressive_variant_learns_from_all() -> None:
    sampler = PGDSampler(20, 6, seed=1, rule="topk")
    known(sampler)
    indices, _ = sampler.next_batch()
    sampler.update(indices, np.full(6, 77.0))
    assert sorted(np.flatnonzero(sampler.draw.trend.priority == 77.0)) == sorted(indices)


def test_the_normalised_top_progresses_like_the_rest() -> None:
    sampler = PGDSampler(20, 4, seed=0, rule="topk-normalised")
    known(sampler)
    indices, weights = sampler.next_batch()
    assert weights.tolist() == [1.0] * 4  # nothing known of the two parts yet
    sampler.update(indices, np.array([1.0, 3.0, 10.0, 6.0]))  # means 2 and 8
    indices, weights = sampler.next_batch()
    assert weights.tolist() == [1.0, 1.0, 0.25, 0.25]
    sampler.update(indices, np.array([1.0, 1.0, 8.0, 8.0]))  # running means 1.9 and 8
    _, weights = sampler.next_batch()
    assert weights[2] == pytest.approx(1.9 / 8)


# --- the unbiased rule -----------------------------------------------------------------


@pytest.mark.parametrize("renewal_share", [0.25, 0.5, 1.0])
def test_stochastic_is_unbiased_whatever_the_priorities(renewal_share: float) -> None:
    rng = np.random.default_rng(5)
    gradients = rng.normal(size=(30, 3)) + np.linspace(0, 4, 30)[:, None]
    sampler = PGDSampler(30, 8, seed=5, renewal_share=renewal_share, gate=0)
    known(sampler)
    sampler.update(np.arange(10), np.zeros(10))  # no priority at all must not mean never drawn
    means: list[list[np.ndarray]] = [[], [], [], []]  # by place in the epoch
    for step in range(8000):
        indices, weights = sampler.next_batch()
        assert weights.max() <= 1 / renewal_share * (1 + 1e-6)
        means[step % 4].append((weights[:, None] * gradients[indices]).mean(0))
    for found in means:
        error = np.mean(found, 0) - gradients.mean(0)
        standard_error = np.std(found, 0) / math.sqrt(len(found))
        assert (np.abs(error) < 4 * standard_error + 1e-9).all()


def test_stochastic_draws_by_the_root_of_the_absolute_priority() -> None:
    sampler = PGDSampler(4, 4, seed=0, renewal_share=0.2, gate=0)
    sampler.update(np.arange(4), np.array([16.0, -4.0, 1.0, 0.0]))
    share = 4 * (np.array([4, 2, 1, 0]) / 7 * 0.8 + 0.05)
    counts = np.zeros(4)
    for _ in range(1000):
        indices, weights = sampler.next_batch()
        np.testing.assert_allclose(weights, 1 / share[indices], rtol=1e-6)
        times = np.bincount(indices, minlength=4)
        assert ((times >= np.floor(share)) & (times <= np.ceil(share))).all()
        counts += times
    np.testing.assert_allclose(counts / 1000, share, atol=0.06)


def test_stochastic_is_uniform_sampling_until_priorities_pay() -> None:
    sampler, uniform = PGDSampler(12, 4, seed=3), UniformSampler(12, 4, seed=3)
    for _ in range(10):
        (indices, weights), (expected, _) = sampler.next_batch(), uniform.next_batch()
        assert indices.tolist() == expected.tolist()
        assert (weights == 1).all()
        sampler.update(indices, np.ones(4))  # all alike: nothing to gain
    assert sampler.summary()["importance-open"] == 0.0
    sampler.update(np.arange(12), np.r_[1e4, np.zeros(11)])
    assert sampler.summary()["importance-open"] == 1.0
    assert any(0 in sampler.next_batch()[0] for _ in range(2))
    sampler.update(np.arange(12), np.ones(12))
    assert not sampler.is_open


def test_the_gate_goes_by_gradient_norms_and_not_by_priorities() -> None:
    spread, even = np.r_[np.full(3, 1e4), np.ones(9)], np.ones(12)
    for norms, opens in ((even, False), (np.sqrt(spread), True), (None, True)):
        sampler = PGDSampler(12, 4, seed=0)
        sampler.update(np.arange(12), spread, norms)
        assert sampler.is_open == opens
    exact = (spread.mean()) / (spread / sampler.draw._shares()).mean()
    assert sampler.summary()["variance-ratio"] == pytest.approx(exact)


def test_evidence_is_the_same_however_examples_were_drawn() -> None:
    ratios = []
    for gate in (0.0, 1e9):  # by priority, and uniformly
        sampler, rng = PGDSampler(200, 20, seed=1, gate=gate), np.random.default_rng(1)
        norms = rng.exponential(size=200)
        priorities = norms * rng.uniform(0.2, 5.0, size=200)
        sampler.update(np.arange(200), priorities)
        before = sampler.summary()["variance-ratio"]
        sampler.update(np.arange(200), priorities, norms)
        expected = sampler.summary()["variance-ratio"]
        for _ in range(3000):
            indices, _ = sampler.next_batch()
            sampler.update(indices, priorities[indices], norms[indices])
        ratios.append(sampler.summary()["variance-ratio"])
        assert expected != pytest.approx(before, rel=0.05)
        assert ratios[-1] == pytest.approx(expected, rel=0.1)


# --- every rule ------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("num_samples", "batch_size"), [(1, 1), (1, 8), (3, 8), (50, 7)])
def test_small_and_odd_sizes(rule: str, num_samples: int, batch_size: int) -> None:
    sampler = PGDSampler(num_samples, batch_size, seed=0, rule=rule, gate=0)
    for step in range(12):
        indices, weights = sampler.next_batch()
        assert 1 <= len(indices) == len(weights) <= batch_size
        assert indices.min() >= 0
        assert indices.max() < num_samples
        if rule != "stochastic":
            assert len(set(indices.tolist())) == len(indices)
        sampler.update(indices, np.cos(indices + step))


@pytest.mark.parametrize("aggressive", [True, False])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stop_at", [0, 2, 9])
def test_saved_and_loaded_continues_as_if_nothing_happened(
    rule: str, aggressive: bool, stop_at: int
) -> None:
    if rule == "stochastic" and not aggressive:
        return
    options = {"rule": rule, "aggressive": aggressive, "gate": 0.9}

    def run(sampler: PGDSampler, steps: range) -> list[list[float]]:
        record = []
        for step in steps:
            indices, weights = sampler.next_batch()
            record += [indices.tolist(), weights.tolist()]
            sampler.update(indices, np.sin(indices * 3.0 + step) * indices)
        return record

    whole = run(PGDSampler(17, 5, seed=2, **options), range(20))
    first = PGDSampler(17, 5, seed=2, **options)
    record = run(first, range(stop_at))
    indices, weights = first.next_batch()  # saved between a batch and its priorities
    second = PGDSampler(17, 5, seed=99, **options)
    second.load_state_dict(first.state_dict())
    first.draw.rng = None  # the saved state is a copy, not a view
    record += [indices.tolist(), weights.tolist()]
    second.update(indices, np.sin(indices * 3.0 + stop_at) * indices)
    assert record + run(second, range(stop_at + 1, 20)) == whole


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rule", "stochastic"),
        ("num_samples", 9),
        ("order", np.zeros(8, dtype=np.int32)),
        ("order", np.arange(8.0)),
        ("priority", np.zeros(7)),
        ("priority", np.full(8, np.inf)),
        ("slope", np.full(8, np.nan)),
        ("slope", np.zeros(8, dtype=np.int32)),
        ("progress", np.zeros(3)),
        ("turns", -1),
        ("iteration", "x"),
        ("iteration", None),
        ("rng", "{}"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(key: str, value: object) -> None:
    sampler, twin = (PGDSampler(8, 4, seed=1, rule="topk") for _ in range(2))
    state = sampler.state_dict()
    known(sampler)
    known(twin)
    for damaged in ({**state, key: value}, {k: v for k, v in state.items() if k != key}):
        with pytest.raises(ValueError, match=r"state|PCG64"):
            sampler.load_state_dict(damaged)
    for _ in range(3):
        np.testing.assert_array_equal(sampler.next_batch()[0], twin.next_batch()[0])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rule", "topk"),
        ("num_samples", 9),
        ("order", np.full(8, 8, dtype=np.int32)),
        ("order", np.arange(8.0)),
        ("weights", np.zeros(8)),
        ("weights", np.full(8, 2.1)),
        ("weights", np.ones(7)),
        ("importance", np.full(8, -1.0, dtype=np.float32)),
        ("importance", np.full(8, np.nan, dtype=np.float32)),
        ("scored_at", np.zeros(8)),
        ("position", 9),
        ("position", "x"),
        ("steps", -1),
        ("by_priority", "x"),
        ("moment_uniform", math.nan),
        ("moment_importance", -1.0),
        ("fresh_importance", math.inf),
        ("rng", "{}"),
    ],
)
def test_a_damaged_state_of_stochastic_is_refused_and_changes_nothing(
    key: str, value: object
) -> None:
    sampler, twin = (PGDSampler(8, 4, seed=1, gate=0) for _ in range(2))
    state = sampler.state_dict()
    known(sampler)
    known(twin)
    for damaged in ({**state, key: value}, {k: v for k, v in state.items() if k != key}):
        with pytest.raises(ValueError, match=r"state|PCG64|importance must be"):
            sampler.load_state_dict(damaged)
    for _ in range(3):
        np.testing.assert_array_equal(sampler.next_batch()[0], twin.next_batch()[0])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rule": "top"}, "rule must be one of"),
        ({"renewal_share": 0.0}, "renewal_share must lie in .0, 1., got 0.0: priorities must be"),
        ({"renewal_share": 1.2}, "renewal_share must lie in"),
        ({"renewal_share": math.nan}, "renewal_share must lie in"),
        ({"smoothing": 1.5}, "smoothing must lie in"),
        ({"aggressive": False}, "aggressive must be True with rule='stochastic'"),
        ({"gate": -1.0}, "gate must be at least 0"),
        ({"num_samples": 0}, "num_samples must be a whole number of at least 1"),
        ({"batch_size": 2.5}, "batch_size must be a whole number of at least 1"),
    ],
)
def test_refuses(change: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        PGDSampler(**({"num_samples": 10, "batch_size": 4} | change))  # type: ignore[arg-type]


def test_the_paper_s_ratios() -> None:
    sampler = PGDSampler.from_ratios(600, top_ratio=0.01, renewal_ratio=0.01, rule="topk", seed=4)
    assert (sampler.batch_size, sampler.renewal_share, sampler.draw.num_renewed) == (12, 0.5, 6)
    with pytest.raises(ValueError, match="top_ratio must be at most 1 - renewal_ratio"):
        PGDSampler.from_ratios(600, top_ratio=0.8, renewal_ratio=0.3)
    with pytest.raises(ValueError, match="renewal_ratio must lie in"):
        PGDSampler.from_ratios(600, top_ratio=0.8, renewal_ratio=0.0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("indices", "scores", "match"),
    [
        ([0, 1], [math.nan, 1.0], "scores must be finite, got .nan.: the model has diverged"),
        ([0, 1], [1.0], "scores must have the shape of indices"),
        ([0, 10], [1.0, 1.0], "indices must lie in range"),
    ],
)
def test_update_refuses(rule: str, indices: list[int], scores: list[float], match: str) -> None:
    sampler = PGDSampler(10, 4, rule=rule)
    with pytest.raises(ValueError, match=match):
        sampler.update(np.array(indices), np.array(scores))


def test_a_data_loader_takes_it_as_batch_sampler() -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    sampler = PGDSampler(10, 4, seed=0, rule="topk")
    loader = torch_data.DataLoader(np.arange(10) * 10, batch_sampler=sampler)
    for batch in loader:
        indices, weights = sampler.take()
        assert batch.tolist() == (indices * 10).tolist()
        sampler.update(indices, weights)


def test_unknown_trend_has_no_estimate() -> None:
    trend = PGDSampler(3, 1, rule="topk").draw.trend
    assert isinstance(trend, Trend)
    assert np.isnan(estimate(trend, 5)).all()

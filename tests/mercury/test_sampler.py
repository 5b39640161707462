import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from flwr_hetero.mercury.algorithm import mixed_probs
from flwr_hetero.mercury.importance_cache import IMPORTANCE_PARTS
from flwr_hetero.mercury.sampler import MercurySampler

ESTIMATORS = ("flat", "cycle", "paper")
UNEQUAL = np.array([0, 2, 20, 22, 40, 42, 60])
"""Bounds of groups: with equal ones even the paper's weights are hardly biased."""


def norms(num_samples: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).exponential(size=num_samples) ** 2


def cut(sampler: MercurySampler, bounds: np.ndarray) -> None:
    """Cut the groups at ``bounds``; the sampler makes them equal again after a cycle."""
    sampler.groups = sampler.groups._replace(bounds=bounds, size=int(np.diff(bounds).max()))


def mean_error(
    sampler: MercurySampler, gradients: np.ndarray, cycles: int, bounds: np.ndarray | None = None
) -> float:
    """Standard errors between the mean estimate over whole cycles and the full mean."""
    estimates = []
    for _ in range(cycles):
        cycle = []
        for _ in range(len(sampler.groups.sizes)):
            group = sampler.refresh_indices()
            if bounds is not None:
                cut(sampler, bounds)
            sampler.update(group, gradients[group])
            for _ in range(2):
                indices, weights = sampler.next_batch()
                cycle.append((weights * gradients[indices]).mean())
        estimates.append(np.mean(cycle))
    error = np.std(estimates) / np.sqrt(cycles)
    return float((np.mean(estimates) - gradients.mean()) / error)


def sorted_by_group(sampler: MercurySampler) -> np.ndarray:
    """Gradients that differ from group to group, so that the choice of groups matters."""
    gradients = norms(sampler.num_samples)
    for group in range(len(sampler.groups.sizes)):
        gradients[sampler.groups.members(group)] *= 1 + 3 * (group % 2) + group
    return gradients


@pytest.mark.parametrize("num_samples", [60, 640], ids=["stride 1", "stride 10"])
@pytest.mark.parametrize("gate", [0.0, 1.2])
def test_flat_is_unbiased_in_use(gate: float, num_samples: int) -> None:
    sampler = MercurySampler(num_samples, 8, seed=1, num_groups=7, gate=gate)
    assert abs(mean_error(sampler, sorted_by_group(sampler), cycles=120)) < 4.5


@pytest.mark.parametrize("beta", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("bounds", [None, UNEQUAL], ids=["equal", "unequal"])
def test_cycle_is_unbiased_in_use(beta: float, bounds: np.ndarray | None) -> None:
    sampler = MercurySampler(60, 8, seed=1, num_groups=6, estimator="cycle", beta=beta)
    if bounds is not None:
        cut(sampler, bounds)
    assert abs(mean_error(sampler, sorted_by_group(sampler), 120, bounds)) < 4.5


def test_cycle_draws_and_weighs_to_the_letter() -> None:
    sampler = MercurySampler(60, 8, estimator="cycle", num_groups=6, groups_per_batch=3)
    cut(sampler, UNEQUAL)
    sampler.update(np.arange(60), norms(60))
    group_of = {int(i): g for g in range(6) for i in sampler.groups.members(g)}
    for _ in range(50):
        indices, weights = sampler.next_batch()
        groups = np.array([group_of[int(index)] for index in indices])
        for index, group, weight in zip(indices, groups, weights, strict=True):
            members = sampler.groups.members(group)
            probs = mixed_probs(sampler.flat.cache.values[members], 0.5)
            share = probs[members.tolist().index(int(index))]
            count = (groups == group).sum()
            assert weight == pytest.approx(6 * 8 / (3 * 60 * count * share), rel=1e-9)


def test_paper_is_biased_in_use() -> None:
    sampler = MercurySampler(60, 8, seed=1, num_groups=6, estimator="paper", groups_per_batch=1)
    cut(sampler, UNEQUAL)
    gradients, estimates = norms(60), []
    gradients[sampler.groups.members(2)] *= 50  # a small group counts as much as a large one
    sampler.update(np.arange(60), gradients)
    for turn in np.tile(np.arange(6), 100):
        sampler.groups = sampler.groups._replace(turn=int(turn))
        indices, weights = sampler.next_batch()
        estimates.append((weights * gradients[indices]).mean())
    error = np.std(estimates) / np.sqrt(len(estimates))
    assert np.mean(estimates) - gradients.mean() > 6 * error


def test_the_gate_opens_for_skewed_scores_and_closes_for_even_ones() -> None:
    sampler = MercurySampler(1000, 32, seed=0)
    assert not sampler.flat.is_open
    sampler.update(np.arange(1000), norms(1000))
    assert sampler.flat.is_open
    assert sampler.next_batch()[1].std() > 0
    for _ in range(300):  # the scores no longer follow the cache: it is useless
        indices, _ = sampler.next_batch()
        sampler.update(indices, np.ones(len(indices)))
    assert not sampler.flat.is_open
    assert set(sampler.next_batch()[1].tolist()) == {1.0}


@pytest.mark.parametrize("refresh", [False, True], ids=["free", "refresh"])
def test_the_gate_measures_the_true_ratio_however_scores_come_in(refresh: bool) -> None:
    sampler, scores = MercurySampler(400, 20, seed=0, num_groups=8), norms(400)
    sampler.update(np.arange(400), scores)
    exact = (scores**2).mean() / (
        scores**2 * sampler.flat.cache.weights(np.arange(400), 0.5)
    ).mean()
    for _ in range(400):
        indices = sampler.refresh_indices() if refresh else sampler.next_batch()[0]
        sampler.update(indices, scores[indices])
    assert sampler.flat.is_open
    assert exact > 3
    assert sampler.summary()["variance-ratio"] == pytest.approx(exact, rel=0.1)


def test_evidence_from_the_time_of_large_scores_does_not_outweigh_the_present() -> None:
    sampler = MercurySampler(400, 20, seed=0)
    sampler.update(np.arange(400), 1000 * norms(400))
    for _ in range(300):
        indices = sampler.refresh_indices()
        sampler.update(indices, np.ones(len(indices)))
    assert not sampler.flat.is_open


def test_paper_draws_and_weighs_to_the_letter() -> None:
    sampler = MercurySampler(40, 8, estimator="paper", num_groups=4, groups_per_batch=2)
    scores = np.where(np.arange(40) % 2, norms(40), 0.0)
    sampler.update(np.arange(40), scores)
    group_of = {int(i): g for g in range(4) for i in sampler.groups.members(g)}
    for _ in range(50):
        for index, weight in zip(*sampler.next_batch(), strict=True):
            members = sampler.groups.members(group_of[int(index)])
            share = np.float32(scores[index]) / scores[members].astype(np.float32).sum()
            assert weight == pytest.approx(1 / (len(members) * share), rel=1e-5)


def test_the_gate_opens_by_free_scores_alone() -> None:
    sampler, scores = MercurySampler(500, 25, seed=0), norms(500)
    opened = []
    for _ in range(100):
        indices, _ = sampler.next_batch()
        sampler.update(indices, scores[indices])
        opened.append(sampler.flat.is_open)
    assert not opened[0]
    assert opened[-1]


def test_behind_a_closed_gate_epochs_are_reshuffled() -> None:
    sampler = MercurySampler(50, 8, seed=3, gate=1e9)
    sampler.update(np.arange(50), norms(50))
    for _ in range(2):
        epoch = list(sampler)
        assert [len(batch) for batch in epoch] == [8, 8, 8, 8, 8, 8, 2]
        assert sorted(index for batch in epoch for index in batch) == list(range(50))
        assert all(sampler.take()[1].tolist() == [1.0] * len(batch) for batch in epoch)


def test_batches_of_a_stride_are_drawn_at_once_and_learnt_from_at_once() -> None:
    sampler = MercurySampler(480, 4, seed=0, gate=0.0)  # stride of 15
    assert sampler.flat.stride.length == 15
    for number in range(1, 16):
        indices, weights = sampler.next_batch()
        assert weights.tolist() == [1.0] * 4, "nothing is learnt within the stride"
        sampler.update(indices, 1.0 + np.arange(4))
        assert (sampler.flat.cache.coverage > 0) == (number == 15)
    assert any(sampler.next_batch()[1].std() > 0 for _ in range(15))


@pytest.mark.parametrize("interrupt", ["group", "pass", "forget", "batches"])
def test_what_was_drawn_ahead_does_not_outlive_other_news(interrupt: str) -> None:
    sampler = MercurySampler(2000, 4, seed=0, gate=0.0, num_groups=20)
    sampler.next_batch()
    if interrupt == "group":
        sampler.update(sampler.refresh_indices(), np.full(100, 9.0))
    if interrupt == "pass":
        sampler.update(np.arange(2000), norms(2000))
    if interrupt == "batches":  # a pass over the data in small batches
        for first in range(0, 2000, 4):
            sampler.update(np.arange(first, first + 4), norms(2000)[first : first + 4])
    if interrupt == "forget":
        sampler.forget(np.array([5]))
    assert sampler.flat.stride.pop() is None


def test_a_stride_is_short_where_the_data_are_few() -> None:
    assert MercurySampler(500, 32).flat.stride.length == 1
    assert MercurySampler(10**6, 32).flat.stride.length == 32


def test_refresh_goes_round_all_groups() -> None:
    sampler = MercurySampler(103, 10, num_groups=9)
    for _ in range(2):
        seen = np.concatenate([sampler.refresh_indices() for _ in range(9)])
        assert sorted(seen.tolist()) == list(range(103))


def test_group_size_follows_the_link_at_once() -> None:
    sampler = MercurySampler(1000, 10, num_groups=10)
    assert len(sampler.refresh_indices()) == 100
    sampler.resize_groups(300)
    assert len(sampler.refresh_indices()) == 300
    sampler.resize_groups(50)
    assert len(sampler.refresh_indices()) == 50


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_groups_may_become_fewer_than_a_batch_takes(estimator: str) -> None:
    sampler = MercurySampler(100, 8, num_groups=10, estimator=estimator)
    sampler.resize_groups(100)
    for _ in range(3):
        sampler.update(sampler.refresh_indices(), norms(100))
        assert len(sampler.next_batch()[0]) == 8


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=30)
@given(data=st.data())
def test_stop_save_load_continue_equals_uninterrupted(estimator: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 40) | st.integers(300, 1000))  # strides of 1, of 2 to 7
    make = lambda: MercurySampler(size, 4, seed=5, estimator=estimator, gate=1.05)  # noqa: E731
    scores = norms(size)
    one, stop = make(), data.draw(st.integers(0, 12))

    groups: list[np.ndarray] = []  # named, and scored in the next step

    def step(sampler: MercurySampler, i: int) -> list[float]:
        if groups:
            group = groups.pop()
            sampler.update(group[: 1 + i % 4], scores[group[: 1 + i % 4]])
        if i % 3 == 0:
            groups.append(sampler.refresh_indices())
        if i % 5 == 4:
            sampler.resize_groups(1 + i % size)
        indices, weights = sampler.next_batch()
        sampler.update(indices, scores[indices] / (1 + 0.01 * i))
        return [*indices.tolist(), *weights.tolist()]

    trace = []
    for i in range(14):
        if i == stop:
            state = one.state_dict()
            one = make()
            one.rng.random(3)
            one.load_state_dict(state)
        trace.append(step(one, i))
    two = make()
    groups.clear()
    assert trace == [step(two, i) for i in range(14)]


def test_state_is_flat_and_small() -> None:
    state = MercurySampler(10_000, 32).state_dict()
    arrays = [value for value in state.values() if isinstance(value, np.ndarray)]
    assert sum(a.nbytes for a in arrays) < 25 * 10_000
    assert all(isinstance(v, (np.ndarray, int, float, str)) for v in state.values())


@pytest.mark.parametrize("num_samples", [1, 2, 3])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_tiny_data(num_samples: int, estimator: str) -> None:
    sampler = MercurySampler(num_samples, 8, estimator=estimator)
    for _ in range(5):
        indices, weights = sampler.next_batch()
        assert (weights > 0).all()
        sampler.update(indices, np.ones(len(indices)))
        assert 1 <= len(sampler.refresh_indices()) <= num_samples


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_samples": 0}, "num_samples must be a whole number of at least 1"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1"),
        ({"num_groups": 0}, "num_groups must lie between 1 and the 20 samples"),
        ({"num_groups": 21}, "num_groups must lie between 1 and the 20 samples"),
        ({"estimator": "hansen"}, "estimator must be one of"),
        ({"scores": "norm"}, "scores must be one of"),
        ({"mixing": 0.0}, "mixing must lie in"),
        ({"mixing": 1.5}, "mixing must lie in"),
        ({"mixing": float("nan")}, "mixing must lie in"),
        ({"gate": -1.0}, "gate must be at least 0"),
        ({"gate": float("inf")}, "gate must be at least 0"),
        ({"beta": -0.5}, "beta must be at least 0"),
        ({"groups_per_batch": 0}, "groups_per_batch must lie between 1 and 4"),
        ({"groups_per_batch": 5}, "groups_per_batch must lie between 1 and 4"),
    ],
)
def test_refuses_bad_arguments(arguments: dict[str, object], match: str) -> None:
    sizes = {"num_samples": 20, "batch_size": 4}
    with pytest.raises(ValueError, match=match):
        MercurySampler(**(sizes | arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("indices", "scores", "match"),
    [
        ([0, 1], [1.0, np.nan], "scores must be finite"),
        ([0, 1], [1.0, np.inf], "scores must be finite"),
        ([0, 1], [1.0, -0.5], "importance must be finite and not negative"),
        ([0, 20], [1.0, 1.0], "indices must lie in"),
        ([0, -1], [1.0, 1.0], "indices must lie in"),
        ([0, 1], [1.0], "scores must have the shape"),
    ],
)
def test_refuses_bad_scores_and_stays_as_it_was(
    indices: list[int], scores: list[float], match: str
) -> None:
    sampler = MercurySampler(20, 4)
    sampler.update(np.arange(20), norms(20))
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=match):
        sampler.update(np.array(indices), np.array(scores))
    after = sampler.state_dict()
    assert all(np.array_equal(before[key], after[key]) for key in before)


def test_losses_become_the_chance_of_an_error() -> None:
    sampler = MercurySampler(2, 4, scores="loss")
    sampler.update(np.arange(2), np.array([np.log(2.0), 50.0]))
    assert sampler.flat.cache.values.tolist() == [0.5, 1.0]
    with pytest.raises(ValueError, match="importance must be finite and not negative"):
        sampler.update(np.arange(2), np.array([-1.0, 1.0]))


def test_a_slot_with_a_new_sample_is_forgotten() -> None:
    sampler = MercurySampler(20, 4)
    sampler.update(np.arange(20), norms(20))
    sampler.forget(np.array([3]))
    assert sampler.summary()["coverage"] == 0.95


def test_an_empty_update_changes_nothing() -> None:
    sampler = MercurySampler(20, 4)
    before = sampler.state_dict()
    sampler.update(np.empty(0, dtype=np.int64), np.empty(0))
    assert all(np.array_equal(value, before[key]) for key, value in sampler.state_dict().items())


GOOD = MercurySampler(20, 4).state_dict()


@pytest.mark.parametrize(
    "damage",
    [
        *({key: None} for key in GOOD if key != "rng"),
        {"rng": "{}"},
        {"importance": np.full(20, np.nan, dtype=np.float32)},
        {"importance": np.ones(19, dtype=np.float32)},
        {"group_order": np.zeros(20, dtype=np.int32)},
        {"group_turn": 99},
        {"moment_uniform": float("nan")},
        {"moment_importance": -1.0},
        {"steps": -1},
        {"steps": float("inf")},
        {"group_turn": float("nan")},
        {"num_averaged": float("inf")},
        {"heard_batches": float("inf")},
        {"num_samples": 21},
        {"estimator": "cycle"},
        {"order": np.zeros(20)},
    ],
    ids=lambda damage: "-".join(damage),
)
def test_refuses_a_damaged_state_and_stays_as_it_was(damage: dict[str, object]) -> None:
    sampler = MercurySampler(20, 4, seed=1)
    before = sampler.state_dict()
    with pytest.raises(ValueError):  # noqa: PT011
        sampler.load_state_dict(GOOD | damage)  # type: ignore[arg-type]
    after = sampler.state_dict()
    assert all(np.array_equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("factor", [3.0, float("inf"), float("nan")])
def test_damaged_weights_of_batches_drawn_ahead_are_no_silent_bias(factor: float) -> None:
    sampler = MercurySampler(640, 8, seed=1, gate=0.0)  # stride of 10
    sampler.update(np.arange(640), norms(640))
    sampler.next_batch()
    state = sampler.state_dict()
    assert len(state["ahead_weights"]) == 72  # type: ignore[arg-type]
    MercurySampler(640, 8, gate=0.0).load_state_dict(state)
    state["ahead_weights"] = factor * np.asarray(state["ahead_weights"])
    with pytest.raises(ValueError, match="start afresh"):
        MercurySampler(640, 8, gate=0.0).load_state_dict(state)


def test_a_missing_key_is_named() -> None:
    state = {key: value for key, value in GOOD.items() if key != "scored_at"}
    with pytest.raises(ValueError, match="scored_at"):
        MercurySampler(20, 4).load_state_dict(state)


def test_summary_tells_what_the_sampler_does() -> None:
    sampler = MercurySampler(200, 10, seed=0)
    assert sampler.summary()["coverage"] == 0.0
    sampler.update(np.arange(200), norms(200))
    sampler.next_batch()
    summary = sampler.summary()
    assert summary["importance-open"] == 1.0
    assert summary["coverage"] == 1.0
    assert summary["mean-age"] == 1.0
    assert 0.2 < summary["effective-share"] < 1.0
    low, middle, high = (summary[name] for name in IMPORTANCE_PARTS)
    assert low < middle < high
    assert all(isinstance(value, float) for value in summary.values())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_feeds_a_data_loader(num_workers: int) -> None:
    sampler = MercurySampler(50, 8, seed=0, gate=0.0)
    sampler.update(np.arange(50), norms(50))
    data = TensorDataset(torch.arange(50))
    loader = DataLoader(data, batch_sampler=sampler, num_workers=num_workers)
    for (batch,) in loader:
        indices, weights = sampler.take()
        assert batch.tolist() == indices.tolist()
        sampler.update(indices, norms(50)[indices] * weights)

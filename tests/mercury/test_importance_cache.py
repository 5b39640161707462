"""The flat estimator: exact whatever the cache holds, where tempting mistakes are not."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from flwr_hetero.mercury.importance_cache import ImportanceCache

N, DRAWS = 500, 60_000
Vector = NDArray[np.float64]


def gradients() -> Vector:
    """One heavy-tailed number per sample."""
    return np.random.default_rng(0).exponential(size=N) ** 2


def cache_of(scores: Vector, scored: NDArray[np.int64] | None = None) -> ImportanceCache:
    cache = ImportanceCache(N)
    indices = np.arange(N) if scored is None else scored
    cache.set(indices, scores[indices], step=1)
    return cache


CACHES: dict[str, Callable[[], ImportanceCache]] = {
    "empty": lambda: ImportanceCache(N),
    "fresh": lambda: cache_of(gradients()),
    "stale": lambda: cache_of(np.random.default_rng(1).permutation(gradients())),
    "half scored": lambda: cache_of(gradients(), np.arange(0, N, 2)),
    "partly zero": lambda: cache_of(np.where(np.arange(N) % 3 == 0, 0.0, gradients())),
    "all zero": lambda: cache_of(np.zeros(N)),
    "one in all": lambda: cache_of(np.eye(1, N, 7)[0] * 1e6),
}


def z_score(estimates: Vector) -> float:
    """Standard errors between the mean of the estimates and the truth."""
    error = float(estimates.std() / np.sqrt(len(estimates)))
    return (float(estimates.mean()) - float(gradients().mean())) / error


@pytest.mark.parametrize("mixing", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("kind", CACHES)
def test_the_expected_gradient_is_the_mean_gradient(kind: str, mixing: float) -> None:
    cache = CACHES[kind]()
    indices = cache.draw((1, DRAWS), mixing, np.random.default_rng(2))[0]
    weights = cache.weights(indices, mixing)
    assert abs(z_score(weights * gradients()[indices])) < 4.5
    assert weights.max() <= 1 / mixing + 1e-9


@pytest.mark.parametrize("kind", CACHES)
def test_the_weights_are_exact_by_enumeration(kind: str) -> None:
    cache = CACHES[kind]()
    probs = 1 / (N * cache.weights(np.arange(N), 0.3))
    assert probs.sum() == pytest.approx(1.0)
    counts = np.bincount(cache.draw((1, DRAWS), 0.3, np.random.default_rng(3))[0], minlength=N)
    z = (counts - DRAWS * probs) / np.sqrt(DRAWS * probs)
    assert np.abs(z).max() < 5.5


def mistake_no_mixing(cache: ImportanceCache, rng: np.random.Generator) -> Vector:
    probs = cache.values / cache.values.sum()
    drawn = rng.choice(N, DRAWS, p=probs)
    return gradients()[drawn] / (N * probs[drawn])


def mistake_no_weights(cache: ImportanceCache, rng: np.random.Generator) -> Vector:
    return gradients()[cache.draw((1, DRAWS), 0.5, rng)[0]]


def mistake_clipped(cache: ImportanceCache, rng: np.random.Generator) -> Vector:
    drawn = cache.draw((1, DRAWS), 0.1, rng)[0]
    return np.minimum(cache.weights(drawn, 0.1), 3.0) * gradients()[drawn]


def mistake_weights_without_the_mixture(cache: ImportanceCache, rng: np.random.Generator) -> Vector:
    drawn = cache.draw((1, DRAWS), 0.5, rng)[0]
    return gradients()[drawn] * cache.values.sum() / (N * np.maximum(cache.values[drawn], 1e-3))


def mistake_self_normalised(cache: ImportanceCache, rng: np.random.Generator) -> Vector:
    drawn = cache.draw((1, DRAWS), 0.5, rng)[0]
    weights = cache.weights(drawn, 0.5).reshape(-1, 4)
    return np.asarray((weights * gradients()[drawn].reshape(-1, 4)).sum(1) / weights.sum(1))


def mistake_without_replacement(cache: ImportanceCache, rng: np.random.Generator) -> Vector:
    weights = cache.weights(np.arange(N), 0.5)
    keys = rng.gumbel(size=(400, N)) - np.log(weights)
    drawn = np.argsort(-keys, axis=1)[:, :250]
    return np.asarray((weights[drawn] * gradients()[drawn]).mean(axis=1))


@pytest.mark.parametrize(
    ("mistake", "kind"),
    [
        (mistake_no_mixing, "partly zero"),
        (mistake_no_weights, "partly zero"),
        (mistake_clipped, "partly zero"),
        (mistake_weights_without_the_mixture, "partly zero"),
        (mistake_self_normalised, "partly zero"),
        (mistake_without_replacement, "fresh"),
    ],
)
def test_tempting_mistakes_are_seen(
    mistake: Callable[[ImportanceCache, np.random.Generator], Vector], kind: str
) -> None:
    assert abs(z_score(mistake(CACHES[kind](), np.random.default_rng(4)))) > 8


def test_good_importance_cuts_the_variance_and_useless_importance_costs_little() -> None:
    def variance(kind: str) -> float:
        cache = CACHES[kind]()
        indices = cache.draw((1, DRAWS), 0.5, np.random.default_rng(5))[0]
        return float((cache.weights(indices, 0.5) * gradients()[indices]).var())

    uniform = gradients().var()
    assert variance("fresh") < 0.3 * uniform
    assert variance("stale") < 1.7 * uniform


def test_the_fixed_share_of_uniform_draws_has_the_right_mean() -> None:
    cache = cache_of(np.eye(1, N, 7)[0])
    rng = np.random.default_rng(6)
    batches = np.array([cache.draw((1, 3), 0.5, rng)[0] for _ in range(4000)])
    share = (batches == 7).mean()  # half by importance: all of them sample 7
    assert share == pytest.approx(0.5 + 0.5 / N, abs=0.015)
    assert set((batches == 7).sum(axis=1).tolist()) <= {1, 2, 3}


def test_samples_never_scored_count_as_average() -> None:
    cache = ImportanceCache(8)
    cache.set(np.array([0, 1]), np.array([4.0, 2.0]), step=1)
    assert cache.values.tolist() == [4.0, 2.0] + [3.0] * 6
    assert cache.coverage == 0.25
    cache.set(np.array([2]), np.array([9.0]), step=2)  # no doubling yet
    assert cache.values[7] == 3.0
    cache.set(np.array([3, 3]), np.array([1.0, 1.0]), step=2)
    assert cache.values[7] == 4.0
    assert cache.scored_at.tolist() == [1, 1, 2, 2, -1, -1, -1, -1]


def test_forgotten_samples_count_as_average_until_scored() -> None:
    cache = ImportanceCache(4)
    cache.set(np.arange(4), np.array([8.0, 2.0, 1.0, 3.0]), step=1)
    cache.forget(np.array([0]))
    assert cache.values.tolist() == [2.0, 2.0, 1.0, 3.0]
    assert cache.coverage == 0.75
    cache.set(np.array([0]), np.array([5.0]), step=2)
    assert cache.coverage == 1.0
    cache.forget(np.arange(4))
    assert cache.coverage == 0.0
    cache.set(np.array([3]), np.array([7.0]), step=3)
    assert cache.values.tolist() == [7.0] * 4


def test_a_saved_cache_is_the_cache() -> None:
    cache = CACHES["half scored"]()
    twin = ImportanceCache.from_state(**cache.state())  # type: ignore[arg-type]
    for each in (cache, twin):
        each.set(np.arange(100), gradients()[:100] / 3, step=2)
    np.testing.assert_array_equal(cache.values, twin.values)
    draws = [each.draw((5, 10), 0.5, np.random.default_rng(0)) for each in (cache, twin)]
    np.testing.assert_array_equal(*draws)


@pytest.mark.parametrize(
    "damage",
    [
        {"importance": np.full(N, np.nan, dtype=np.float32)},
        {"importance": np.full(N, -1, dtype=np.float32)},
        {"importance": np.ones(N, dtype=np.int32)},
        {"importance": np.ones((N, 1), dtype=np.float32)},
        {"importance": np.ones(N - 1, dtype=np.float32)},
        {"scored_at": np.ones(N)},
        {"scored_at": None},
    ],
)
def test_refuses_a_damaged_state(damage: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"start afresh|importance must"):
        ImportanceCache.from_state(**(CACHES["fresh"]().state() | damage))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -0.1, 1e39])
def test_a_refused_score_leaves_the_cache_as_it_was(bad: float) -> None:
    cache = cache_of(gradients())
    before = cache.values.copy()
    with pytest.raises(ValueError, match="importance must be finite and not negative"):
        cache.set(np.array([0, 1]), np.array([5.0, bad]), step=2)
    np.testing.assert_array_equal(cache.values, before)

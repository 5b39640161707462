"""The sampler: unbiased whatever its scores hold; strides, groups, state."""

import numpy as np
import pytest

from flwr_hetero.mercury.sampler import MIXING, MercurySampler

N = 500
GRADIENTS = np.random.default_rng(0).exponential(size=N) ** 2
"""One heavy-tailed number per sample."""
SCORES = {
    "fresh": GRADIENTS,
    "stale": np.random.default_rng(1).permutation(GRADIENTS),
    "partly zero": np.where(np.arange(N) % 3 == 0, 0.0, GRADIENTS),
    "all zero": np.zeros(N),
    "one in all": np.eye(1, N, 6)[0] * 1e6,
}


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("kind", SCORES)
def test_mean_gradient_is_unbiased(kind: str, step: int) -> None:
    sampler = MercurySampler(N, N, seed=2)
    known = np.arange(0, N, step)
    sampler.update(known, SCORES[kind][known])
    batches = [sampler.next_batch() for _ in range(120)]
    indices, weights = (np.concatenate(x) for x in zip(*batches, strict=True))
    estimates = weights * GRADIENTS[indices]
    error = estimates.std() / np.sqrt(len(estimates))
    assert abs(estimates.mean() - GRADIENTS.mean()) < 4.5 * error
    assert weights.max() <= 1 / MIXING + 1e-9


@pytest.mark.parametrize("num_samples", [60, 480], ids=["stride 1", "stride 7"])
def test_flat_is_unbiased_in_use(num_samples: int) -> None:
    sampler = MercurySampler(num_samples, 8, seed=1)
    gradients = GRADIENTS[:num_samples].copy()
    for group in range(16):  # the choice of groups matters
        gradients[sampler.groups.members(group)] *= 1 + 3 * (group % 2) + group
    estimates = []
    for _ in range(60):
        cycle = []
        for _ in range(16):
            group = sampler.refresh_indices()
            sampler.update(group, gradients[group])
            for _ in range(2):
                indices, weights = sampler.next_batch()
                cycle.append((weights * gradients[indices]).mean())
        estimates.append(np.mean(cycle))
    error = np.std(estimates) / np.sqrt(len(estimates))
    assert abs(np.mean(estimates) - gradients.mean()) < 4.5 * error


def test_samples_without_a_score_count_as_average() -> None:
    sampler = MercurySampler(8, 1)
    sampler.update(np.array([0, 1]), np.array([4.0, 2.0]))
    assert sampler.importance.tolist() == [4.0, 2.0] + [3.0] * 6
    assert sampler.coverage == 0.25
    sampler.next_batch()
    sampler.update(np.array([2, 2]), np.array([9.0, 9.0]))  # no doubling yet
    assert sampler.importance[7] == 3.0
    sampler.update(np.array([3, 3]), np.array([1.0, 1.0]))
    assert sampler.importance[7] == 4.0
    assert sampler.scored_at.tolist() == [0, 0, 1, 1, -1, -1, -1, -1]
    sampler.next_batch()
    assert sampler.summary() == {"coverage": 0.5, "mean-age": 1.5}
    sampler.forget(np.array([0]))  # another sample took its place
    assert sampler.importance.tolist() == [4.0, 2.0, 9.0, 1.0] + [4.0] * 4
    sampler.forget(np.arange(8))
    assert sampler.coverage == 0.0


@pytest.mark.parametrize(
    ("setting", "rule"), [("estimator", "flat, paper"), ("scores", "importance, loss")]
)
def test_bad_settings_are_refused(setting: str, rule: str) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be one of {rule}"):
        MercurySampler(9, 4, **{setting: "norm"})


def test_paper_draws_from_few_groups_by_all_scores() -> None:
    sampler = MercurySampler(640, 8, estimator="paper")
    for _ in range(20):
        indices, _ = sampler.next_batch()
        owners = [np.isin(indices, sampler.groups.members(group)).any() for group in range(16)]
        assert sum(owners) == 4
        sampler.update(indices, np.arange(1.0, 9.0))
        assert sampler.next_batch()
        assert sampler.coverage > 0, "pending scores are learnt before each draw"

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero.client.sampled_loss import importance
from flwr_hetero.sampler import InTurn, MercurySampler, PGDSampler, SampledLoss

DATA = TensorDataset(torch.randn(12, 3, generator=torch.manual_seed(0)), torch.arange(12) % 3)


class Weighted(UniformSampler):
    """Draws with weights that count, and remembers what it is told."""

    def next_batch(self):
        indices, _ = super().next_batch()
        return indices, 1.0 + indices

    def update(self, indices, scores):
        self.told = getattr(self, "told", [])
        self.told.append((indices, scores))


def test_it_is_the_weighted_mean_and_the_sampler_hears_the_losses():
    sampler = Weighted(12, 4, seed=0)
    criterion = SampledLoss(sampler)
    for inputs, targets in DataLoader(DATA, batch_sampler=sampler):
        inputs.requires_grad_()
        loss = criterion(inputs, targets)
        indices, scores = sampler.told[-1]
        losses = cross_entropy(inputs, targets, reduction="none")
        assert torch.equal(DATA.tensors[1][indices], targets)
        assert scores == pytest.approx(losses.detach().numpy())
        assert loss.item() == pytest.approx(np.mean((1 + indices) * scores))
        loss.backward()
        assert inputs.grad.any()
    assert len(sampler.told) == 3


def test_mercury_gets_what_it_wants(monkeypatch):
    told = []
    monkeypatch.setattr(MercurySampler, "update", lambda self, i, s: told.append(s))
    for kind, sampler in (
        ("upper", MercurySampler(12, 12)),
        ("loss", MercurySampler(12, 12, scores="loss")),
    ):
        ((inputs, targets),) = DataLoader(DATA, batch_sampler=sampler)
        SampledLoss(sampler)(inputs, targets)
        assert told.pop() == pytest.approx(importance(inputs, targets, kind))


def test_another_batch_sampler_is_refused():
    with pytest.raises(ValueError, match="sampler must be a sampler of"):
        SampledLoss(DataLoader(DATA, batch_size=4).batch_sampler)


def test_each_sampler_in_turn_hears_what_it_wants():
    plain, mercury = Weighted(12, 4, seed=0), MercurySampler(12, 4, gate=0)
    told = []
    mercury.update = lambda indices, scores: told.append((indices, scores))
    both = InTurn([plain, mercury])
    criterion = SampledLoss(both)
    for inputs, targets in DataLoader(DATA, batch_sampler=both):
        criterion(inputs, targets)
    for heard, wanted in ((plain.told, "loss"), (told, "importance")):
        for indices, scores in heard:
            inputs, targets = DATA.tensors[0][indices], DATA.tensors[1][indices]
            losses = cross_entropy(inputs, targets, reduction="none").numpy()
            expected = losses if wanted == "loss" else importance(inputs, targets)
            assert scores == pytest.approx(expected)
    assert (len(plain.told), len(told)) == (2, 1)


@pytest.mark.parametrize("wrap", [lambda sampler: sampler, lambda sampler: InTurn([sampler])])
def test_losses_are_no_priorities(wrap):
    with pytest.raises(ValueError, match="sampler must learn from losses, got 'PGDSampler'"):
        SampledLoss(wrap(PGDSampler(12, 4)))

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import DataLoader, TensorDataset

from flwr_hetero.client.sampled_loss import gradient_norms, score_batches, scoring
from flwr_hetero.sampler import InTurn, MercurySampler, PGDSampler, SampledLoss, UniformSampler

DATA = TensorDataset(torch.randn(12, 3, generator=torch.manual_seed(0)), torch.arange(12) % 3)


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(),
        nn.Linear(4 * 36, 3),
    )  # fmt: skip


def images(count=20):
    torch.manual_seed(1)
    return torch.randn(count, 1, 8, 8), torch.randint(0, 3, (count,))


# --- scores of samples -----------------------------------------------------------------


def test_gradient_norm_is_softmax_minus_label():
    torch.manual_seed(0)
    outputs, targets = 3 * torch.randn(50, 7), torch.randint(0, 7, (50,))
    by_hand = (outputs.softmax(1) - one_hot(targets, 7)).norm(dim=1)
    np.testing.assert_allclose(gradient_norms(outputs, targets), by_hand, rtol=1e-5)


def test_scores_leave_training_graph_alone():
    model, (inputs, targets) = small_model(), images()
    gradients = []
    for scored in (False, True):
        torch.manual_seed(2)
        model.zero_grad()
        outputs = model(inputs)
        if scored:
            gradient_norms(outputs, targets)
        cross_entropy(outputs, targets).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_scoring_leaves_model_as_it_was():
    model, (inputs, targets) = small_model(), images()
    model[1].eval()  # a user's frozen BatchNorm stays frozen
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    score_batches(model, [(inputs, targets)])
    with pytest.raises(RuntimeError), scoring(model):
        model(torch.zeros(1))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())


def test_score_does_not_depend_on_its_batch():
    model, (inputs, targets) = small_model(), images()
    whole = score_batches(model, [(inputs, targets)])
    parts = score_batches(model, zip(inputs.split(3), targets.split(3), strict=True))
    np.testing.assert_allclose(whole, parts, rtol=1e-5)
    by_hand = cross_entropy(model.eval()(inputs), targets, reduction="none").detach()
    np.testing.assert_allclose(whole, by_hand, rtol=1e-5)


# --- the criterion ---------------------------------------------------------------------


class Weighted(UniformSampler):
    """Draws with weights that count, and keeps the scores it is given."""

    def __init__(self, *sizes, learns_from="loss"):
        super().__init__(*sizes)
        self.learns_from, self.scores_seen = learns_from, []

    def next_batch(self):
        indices, _ = super().next_batch()
        return indices, 1.0 + indices

    def update(self, indices, scores):
        self.scores_seen.append((indices, scores))


@pytest.mark.parametrize("learns_from", ["loss", "importance"])
def test_weighted_mean_and_scores(learns_from):
    sampler = Weighted(12, 4, learns_from=learns_from)
    criterion = SampledLoss(sampler)
    for inputs, targets in DataLoader(DATA, batch_sampler=sampler):
        inputs.requires_grad_()
        loss = criterion(inputs, targets)
        indices, scores = sampler.scores_seen[-1]
        losses = cross_entropy(inputs, targets, reduction="none").detach().numpy()
        wanted = losses if learns_from == "loss" else gradient_norms(inputs, targets)
        assert torch.equal(DATA.tensors[1][indices], targets)
        assert scores == pytest.approx(wanted)
        assert loss.item() == pytest.approx(np.mean((1 + indices) * losses))
        loss.backward()
        assert inputs.grad.any()
    assert len(sampler.scores_seen) == 3


def test_each_in_turn_gets_its_own_scores():
    samplers = [Weighted(12, 4), Weighted(12, 4, learns_from="importance")]
    both = InTurn(samplers)
    criterion = SampledLoss(both)
    for inputs, targets in DataLoader(DATA, batch_sampler=both):
        criterion(inputs, targets)
    assert [len(sampler.scores_seen) for sampler in samplers] == [2, 1]
    for sampler, score in (
        (samplers[0], partial(cross_entropy, reduction="none")),
        (samplers[1], gradient_norms),
    ):
        for indices, scores in sampler.scores_seen:
            assert scores == pytest.approx(score(*DATA[indices]))


def test_mercury_says_what_it_learns_from():
    assert MercurySampler(12, 4).learns_from == "importance"
    assert MercurySampler(12, 4, scores="loss").learns_from == "loss"


@pytest.mark.parametrize(
    ("sampler", "match"),
    [
        (DataLoader(DATA, batch_size=4).batch_sampler, "sampler must be a sampler of"),
        (InTurn([UniformSampler(12, 4), PGDSampler(12, 4)]), "sampler must learn from losses"),
    ],
)
def test_other_samplers_are_refused(sampler, match):
    with pytest.raises(ValueError, match=match):
        SampledLoss(sampler)

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import DataLoader, TensorDataset

from flwr_hetero.client.weighted_loss import gradient_norms, score_batches, scoring
from flwr_hetero.sampler import (
    MercurySampler,
    PGDSampler,
    PriorityFeed,
    TopLossSampler,
    UniformSampler,
    WeightedLoss,
    sample_priorities,
)

DATA = TensorDataset(torch.randn(12, 3, generator=torch.manual_seed(0)), torch.arange(12) % 3)
NOTHING = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
each = partial(cross_entropy, reduction="none")
by_scores = pytest.mark.parametrize("learns_from", ["loss", "importance"])


def test_gradient_norm_is_softmax_minus_label():
    torch.manual_seed(0)
    outputs = 3 * torch.randn(50, 7)
    targets = torch.randint(0, 7, (50,))
    by_hand = (outputs.softmax(1) - one_hot(targets, 7)).norm(dim=1)
    np.testing.assert_allclose(gradient_norms(outputs, targets), by_hand, rtol=1e-5)


def test_scoring_leaves_model_as_it_was_and_no_batch_counts():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(4 * 36, 3))
    inputs = torch.randn(20, 1, 8, 8)
    targets = torch.randint(0, 3, (20,))
    model[1].eval()  # a user's frozen BatchNorm stays frozen
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    whole = score_batches(model, [(inputs, targets)])
    parts = score_batches(model, zip(inputs.split(3), targets.split(3), strict=True))
    np.testing.assert_allclose(whole, parts, rtol=1e-5)
    with pytest.raises(RuntimeError), scoring(model):
        model(torch.zeros(1))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    by_hand = each(model.eval()(inputs), targets).detach()
    np.testing.assert_allclose(whole, by_hand, rtol=1e-5)


class Weighted(UniformSampler):
    """Draws with weights that count, and keeps the scores it is given."""

    def __init__(self, *sizes, learns_from="loss"):
        super().__init__(*sizes)
        self.learns_from = learns_from
        self.scores_seen = []

    def next_batch(self):
        indices, _ = super().next_batch()
        return indices, 1.0 + indices

    def update(self, indices, scores):
        self.scores_seen.append((indices, scores))


@by_scores
def test_weighted_mean_and_scores(learns_from):
    sampler = Weighted(12, 4, learns_from=learns_from)
    criterion = WeightedLoss(sampler)
    for inputs, targets in DataLoader(DATA, batch_sampler=sampler):
        loss = criterion(inputs.requires_grad_(), targets)
        indices, scores = sampler.scores_seen[-1]
        losses = each(inputs, targets).detach().numpy()
        wanted = losses if learns_from == "loss" else gradient_norms(inputs, targets)
        assert scores == pytest.approx(wanted)
        assert loss.item() == pytest.approx(np.mean((1 + indices) * losses))
        loss.backward()
        assert inputs.grad.any()
    assert len(sampler.scores_seen) == 3


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((DataLoader(DATA, batch_size=4).batch_sampler,), "sampler must be a sampler of"),
        ((PGDSampler(12, 4),), "sampler must learn from losses"),
        *[
            ((UniformSampler(12, 4), loss), 'loss_fn must be made with reduction="none", got')
            for loss in (nn.CrossEntropyLoss(), partial(cross_entropy, reduction="sum"))
        ],
    ],
)
def test_other_samplers_and_reduced_losses_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        WeightedLoss(*arguments)


def one_batch(loss_fn, outputs, targets, learns_from="loss"):
    """Return a batch's loss, the weights of its examples, and its scores."""
    sampler = Weighted(4, 4, learns_from=learns_from)
    assert len(next(iter(sampler))) == 4
    loss = WeightedLoss(sampler, loss_fn)(outputs, targets)
    ((indices, scores),) = sampler.scores_seen
    return loss, 1 + indices, scores


@by_scores
def test_losses_of_many_elements_are_averaged(learns_from):
    torch.manual_seed(3)
    outputs = torch.randn(4, 3, 5, requires_grad=True)
    targets = torch.randn(4, 3, 5)
    loss, weights, scores = one_batch(nn.MSELoss(reduction="none"), outputs, targets, learns_from)
    losses = ((outputs - targets) ** 2).detach().flatten(1).mean(1).numpy()
    assert loss.item() == pytest.approx(np.mean(weights * losses))
    if learns_from == "importance":
        losses = (2 / 15 * (outputs - targets)).detach().flatten(1).norm(dim=1).numpy()
    assert scores == pytest.approx(losses)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("ignored", [-100, 0])
@by_scores
def test_masked_tokens_do_not_count(flat, ignored, learns_from):
    torch.manual_seed(3)
    logits = torch.randn(4, 6, 7)
    tokens = torch.randint(1, 7, (4, 6))
    lengths = [6, 3, 1, 0]
    for example, left in enumerate(lengths):
        tokens[example, left:] = ignored
    loss_fn = partial(each, ignore_index=0)
    if ignored:
        loss_fn = nn.CrossEntropyLoss(reduction="none", ignore_index=ignored)
    given = (logits.flatten(0, 1), tokens.flatten()) if flat else (logits.mT, tokens)
    loss, weights, scores = one_batch(loss_fn, *given, learns_from)
    pairs = [(logits[i, :left], tokens[i, :left]) for i, left in enumerate(lengths[:3])]
    losses = [cross_entropy(*pair).item() for pair in pairs] + [0.0]
    assert loss.item() == pytest.approx(np.mean(weights * losses))
    if learns_from == "importance":
        errors = [(out.softmax(1) - one_hot(tok, 7)).norm().item() / len(tok) for out, tok in pairs]
        losses = [*errors, 0.0]
    assert scores == pytest.approx(losses)


@by_scores
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, learns_from):
    torch.manual_seed(3)
    layer = nn.Linear(3, 5)
    inputs = torch.randn(4, 3)
    targets = torch.arange(4)
    wanted, _, exact = one_batch(each, layer(inputs), targets, learns_from)
    with torch.autocast("cpu", dtype):
        outputs = layer(inputs)
        assert outputs.dtype == dtype
        loss, _, scores = one_batch(each, outputs, targets, learns_from)
    loss.backward()
    assert (loss.dtype, scores.dtype) == (torch.float32, np.float64)
    assert loss.item() == pytest.approx(wanted.item(), rel=0.03)
    assert scores == pytest.approx(exact, rel=0.03)


def test_evaluation_is_refused():
    criterion = WeightedLoss(UniformSampler(12, 4))
    with pytest.raises(RuntimeError, match="in training only: evaluate with loss_fn"):
        torch.no_grad()(criterion)(*NOTHING)
    with pytest.raises(IndexError, match="in training only"):
        criterion(*NOTHING)


NUM, BATCH = 50, 4
INPUTS = torch.randn(NUM, 6, generator=torch.manual_seed(0))
SEEN = TensorDataset(INPUTS, INPUTS[:, 0].gt(0).long(), torch.arange(NUM))


def one_ahead(batches):
    """Fetch the next batch before this one is trained, as accelerate's loaders do."""
    batches = iter(batches)
    following = next(batches)
    while following is not None:
        current = following
        following = next(batches, None)
        yield current


LOOK_AHEAD = {"none": (0, iter), "batch": (0, one_ahead), "both": (2, one_ahead)}
every_way = pytest.mark.parametrize("way", LOOK_AHEAD)


def trained(sampler, way):
    """Give the batches of two passes, of which the first is broken off."""
    num_workers, fetch = LOOK_AHEAD[way]
    loader = DataLoader(SEEN, batch_sampler=sampler, num_workers=num_workers)
    for stop in (5, 13):
        for count, batch in enumerate(fetch(loader), 1):
            yield batch
            if count == stop:
                break
        assert count == min(stop, len(loader))


def spy(sampler, monkeypatch):
    """Note what a sampler is given to learn."""
    given = []
    update = sampler.update
    monkeypatch.setattr(sampler, "update", lambda *new: (given.append(new), update(*new)))
    return given


@every_way
@pytest.mark.parametrize("kind", [MercurySampler, TopLossSampler])
def test_scores_are_of_the_samples_trained(kind, way, monkeypatch):
    sampler = kind(NUM, BATCH)
    model = nn.Linear(6, 2)
    given = spy(sampler, monkeypatch)
    criterion = WeightedLoss(sampler)
    score = gradient_norms if sampler.learns_from == "importance" else each
    for inputs, targets, trained_now in trained(sampler, way):
        outputs = model(inputs)
        criterion(outputs, targets).backward()
        indices, scores = given.pop()
        np.testing.assert_array_equal(indices, trained_now)
        expected = np.asarray(torch.as_tensor(score(outputs, targets)).detach())
        np.testing.assert_allclose(scores, expected, rtol=1e-6)


@every_way
@pytest.mark.parametrize("rule", ["topk", "stochastic"])
def test_priorities_are_of_the_samples_trained(rule, way, monkeypatch):
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    sampler = PGDSampler(NUM, BATCH, rule=rule)
    feed = PriorityFeed(sampler, model)
    given = spy(sampler, monkeypatch)
    criterion = WeightedLoss(feed)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    measured = []
    for count, (inputs, targets, trained_now) in enumerate(trained(feed, way), 1):
        expected = sample_priorities(model, each, inputs, targets, feed.gradient.direction)
        optimizer.zero_grad()
        (criterion(model(inputs), targets) / 3).backward()  # as in accumulation
        optimizer.step()
        if given:
            indices, priorities, *_ = given.pop()
            measured.append(count)
            np.testing.assert_array_equal(indices, trained_now)
            np.testing.assert_allclose(priorities, expected, rtol=1e-3, atol=1e-3)
    assert measured == [t for t in range(2, 19) if rule == "topk" or t % 4 == 1]

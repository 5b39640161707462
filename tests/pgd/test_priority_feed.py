"""PGD's sampler, fed by the training step itself, and the aggregated gradient."""

import numpy as np
import pytest
import torch
from oracles.pgd import renew_sum
from pgd.nets import LOSS, NUM, data, image_net
from torch import nn

from flwr_hetero.pgd import sampler as sampler_module
from flwr_hetero.pgd.priorities import AggregatedGradient
from flwr_hetero.pgd.sampler import RULES
from flwr_hetero.sampler import PGDSampler, PriorityFeed, WeightedLoss, sample_priorities


def small():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    return model, *data(model)


@pytest.fixture
def every_batch(monkeypatch):
    monkeypatch.setitem(sampler_module.EVERY, "stochastic", 1)


def step(model, feed, optimizer, inputs, targets):
    """Train as a user would; return the batch and what it cost."""
    indices, weights = feed.next_batch()
    optimizer.zero_grad()
    losses = LOSS(model(inputs[indices]), targets[indices])
    (losses * torch.from_numpy(weights).to(losses)).mean().backward()
    extra = feed.on_batch(model, indices, losses)
    optimizer.step()
    return indices, extra


def loop(model, feed, inputs, targets, steps):
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(steps):
        step(model, feed, optimizer, inputs, targets)


def test_aggregate_follows_eq_9():
    weight = nn.Parameter(torch.zeros(3))
    gradient = AggregatedGradient({"w": weight}, num_samples=10)
    rng = np.random.default_rng(0)
    total = np.zeros(3)
    covered = np.zeros(())
    for size in (4, 2, 10, 3, 25):
        weight.grad = torch.from_numpy(rng.normal(size=3).astype(np.float32))
        gradient.absorb(size, {"w": weight.grad})
        size = min(size, 10)
        total = renew_sum(total, size * weight.grad.numpy(), size, 10)
        covered = renew_sum(covered, np.array(float(size)), size, 10)
        expected = total * 10 / covered
        np.testing.assert_allclose(gradient.direction["w"].numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.parametrize("rule", RULES)
def test_sampler_gets_the_steps_priorities(rule, layers, monkeypatch, every_batch):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.ReLU(), nn.Linear(9, 5))
    inputs, targets = data(model)
    sampler = PGDSampler(NUM, 8, rule=rule, seed=1)
    feed = PriorityFeed(sampler, model, layers=layers)
    updates = []
    update = sampler.update
    monkeypatch.setattr(sampler, "update", lambda *given: (updates.append(given), update(*given)))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    total = torch.zeros(5, 9)
    for number in range(9):
        direction = feed.gradient.direction
        expected = sample_priorities(model, LOSS, inputs, targets, direction)
        indices, extra = step(model, feed, optimizer, inputs, targets)
        assert extra == ((8 if layers == "all" else 2) if number else 0)  # 0.3 of a pass each
        total = (1 - 8 / NUM) * total + 8 * model[3].weight.grad
        torch.testing.assert_close(feed.gradient.total["3.weight"], total)
        assert len(updates) == number  # the first batch has no direction
        if updates:
            np.testing.assert_array_equal(updates[-1][0], indices)
            found = updates[-1][1]
            np.testing.assert_allclose(found, expected[indices].numpy(), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("rule", RULES)
def test_diverged_losses_teach_nothing(rule, every_batch):
    model, inputs, targets = small()
    feed = PriorityFeed(PGDSampler(NUM, 4, rule=rule), model)
    loop(model, feed, inputs, targets, 9)
    before = feed.state_dict()
    torch.nn.init.constant_(model[1].weight, torch.nan)
    with pytest.raises(ValueError, match=r"scores must be finite, got .nan.*has diverged"):
        loop(model, feed, inputs, targets, 1)
    for name in ("priority", "gradient.1.weight", "gradient_covered", "batches"):
        np.testing.assert_equal(feed.state_dict()[name], before[name])


def test_full_pass_is_the_papers_first_step():
    torch.manual_seed(2)
    model = image_net()
    inputs, targets = data(model)
    model(inputs)
    buffers = [b.clone() for b in model.buffers()]
    feed = PriorityFeed(PGDSampler(NUM, 4, rule="topk"), model, layers="all")
    for _ in range(2):  # the second one in the middle of training
        feed.full_pass(model, LOSS, inputs, targets, batch_size=7)
        assert feed.listener.collect(NUM) is None
        feed.next_batch()
    assert model.training
    assert all(map(torch.equal, buffers, model.buffers()))
    assert all(p.grad is None for p in model.parameters())
    model.eval()
    LOSS(model(inputs), targets).sum().backward()
    gradient = {n: p.grad for n, p in model.named_parameters()}
    for name, part in feed.gradient.direction.items():
        torch.testing.assert_close(part, gradient[name], rtol=1e-4, atol=1e-4)
    expected = sample_priorities(model, LOSS, inputs, targets, gradient)
    found = feed.sampler.trend.priority
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-3, atol=1e-3)
    assert feed.sampler.num_renewed == 2


@pytest.mark.parametrize(
    ("model", "layers", "match"),
    [
        (nn.ReLU(), "last", "model must have parameters, got 'ReLU'"),
        (nn.Linear(2, 2), "first", "layers must be one of last, all"),
        (nn.LSTM(2, 2), "last", "must be linear in their .* got 'LSTM': take layers='last'"),
    ],
)
def test_bad_arguments_are_refused(model, layers, match):
    with pytest.raises(ValueError, match=match):
        PriorityFeed(PGDSampler(4, 2), model, layers=layers)


def measured_by_loss(layers, dtype=None, scale=1.0):
    """Train on a loss that feeds; return what the sampler was told, and the aggregate."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.LayerNorm(9), nn.Linear(9, 5))
    inputs, targets = data(model)
    sampler = PGDSampler(NUM, 4, rule="topk")
    feed = PriorityFeed(sampler, model, layers=layers)
    told = []
    sampler.update = lambda *given: told.append(given)
    criterion = WeightedLoss(feed)
    for indices in feed:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = criterion(model(inputs[indices]).float(), targets[indices])
        (loss * scale).backward()
    feed.close()
    return told, feed.gradient.total


@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.parametrize(
    ("dtype", "scale", "error"),
    [(None, 0.25, 1e-4), (None, 2.0**16, 1e-4), (torch.bfloat16, 1.0, 0.1)],
)
def test_scaled_and_half_precision_losses_tell_the_same(layers, dtype, scale, error):
    plain, total = measured_by_loss(layers)
    told, aggregate = measured_by_loss(layers, dtype, scale)
    assert len(told) == len(plain) == 5
    for (indices, found), (same, expected) in zip(told, plain, strict=True):
        np.testing.assert_array_equal(indices, same)
        np.testing.assert_allclose(found, expected, atol=error * np.abs(expected).max())
    for name, part in aggregate.items():
        torch.testing.assert_close(part, total[name], rtol=error, atol=error * 10)

"""PGD's sampler, fed by the training step itself."""

import numpy as np
import pytest
import torch
from pgd.nets import LOSS, NUM, Tied, TiedByHand, data, image_net
from torch import nn

from flwr_hetero.client.weighted_loss import gradient_norms
from flwr_hetero.pgd import priority_feed
from flwr_hetero.pgd.layer_priorities import LayerPriorities
from flwr_hetero.pgd.sampler import RULES
from flwr_hetero.sampler import (
    PGDSampler,
    PriorityFeed,
    UniformSampler,
    WeightedLoss,
    sample_priorities,
)


def small():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    return model, *data(model)


def loop(model, feed, inputs, targets, steps):
    """Train as a user would; with a plain sampler, too."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(steps):
        indices, weights = feed.next_batch()
        optimizer.zero_grad()
        losses = LOSS(model(inputs[indices]), targets[indices])
        (losses * torch.from_numpy(weights).to(losses)).mean().backward()
        if isinstance(feed, PriorityFeed):
            feed.on_batch(model, indices, losses)
        optimizer.step()
        feed.update(indices, losses.detach().numpy())


@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.parametrize("rule", RULES)
def test_sampler_gets_the_steps_priorities(rule, layers, monkeypatch):
    monkeypatch.setattr(priority_feed, "EVERY_OPEN", 1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.ReLU(), nn.Linear(9, 5))
    inputs, targets = data(model)
    sampler = PGDSampler(NUM, 8, rule=rule, gate=0, seed=1)
    feed = PriorityFeed(sampler, model, layers=layers)
    updates, update = [], sampler.update
    monkeypatch.setattr(sampler, "update", lambda *given: (updates.append(given), update(*given)))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    total = torch.zeros(5, 9)
    for step in range(9):
        indices, weights = feed.next_batch()
        direction = feed.gradient.direction
        expected = sample_priorities(model, LOSS, inputs[indices], targets[indices], direction)
        optimizer.zero_grad()
        losses = LOSS(model(inputs[indices]), targets[indices])
        (losses * torch.from_numpy(weights).to(losses)).mean().backward()
        upper = gradient_norms(model(inputs[indices]), targets[indices])
        extra = feed.on_batch(model, indices, losses)
        assert extra == ((8 if layers == "all" else 2) if step else 0)  # 0.3 of a pass each
        total = (1 - 8 / NUM) * total + 8 * model[3].weight.grad
        torch.testing.assert_close(feed.gradient.total["3.weight"], total)
        optimizer.step()
        assert len(updates) == step  # the first batch has no direction
        if updates:
            index, scores, norms, drawn = updates[-1]
            np.testing.assert_array_equal(drawn, weights)
            np.testing.assert_array_equal(index, indices)
            np.testing.assert_allclose(scores, expected.numpy(), rtol=1e-3, atol=1e-2)
            np.testing.assert_allclose(norms / norms[0], upper / upper[0], rtol=1e-4)


@pytest.mark.parametrize(
    ("rule", "gate", "measured", "absorbed"),
    [
        ("stochastic", 1.2, [6, 11], [1, 5, 6, 10, 11]),
        ("stochastic", 0.0, [3, 5, 7, 9, 11, 13], [1, 3, 5, 7, 9, 11, 13]),
        ("topk", 1.2, list(range(2, 14)), list(range(1, 14))),
    ],
)
def test_which_batches_are_measured(rule, gate, measured, absorbed, monkeypatch):
    monkeypatch.setattr(priority_feed, "EVERY_OPEN", 2)
    monkeypatch.setattr(priority_feed, "EVERY_CLOSED", 5)
    model, inputs, targets = small()
    sampler, updates, sums = PGDSampler(NUM, 4, rule=rule, gate=gate), [], []
    feed = PriorityFeed(sampler, model)
    monkeypatch.setattr(sampler, "update", lambda *_: updates.append(feed._trained + 1))
    add = feed.gradient.absorb
    monkeypatch.setattr(
        feed.gradient,
        "absorb",
        lambda num, new: (sums.append((feed._trained + 1, num)), add(num, new)),
    )
    loop(model, feed, inputs, targets, 13)
    assert updates == measured
    assert [batch for batch, _ in sums] == absorbed
    assert {num for _, num in sums} == {4 * feed.measure_every}


@pytest.mark.parametrize("rule", RULES)
def test_diverged_losses_teach_nothing(rule, monkeypatch):
    monkeypatch.setattr(priority_feed, "EVERY_OPEN", 1)
    model, inputs, targets = small()
    feed = PriorityFeed(PGDSampler(NUM, 4, rule=rule, gate=0), model)
    loop(model, feed, inputs, targets, 9)
    before = feed.sampler.summary() | feed.gradient.state_dict()
    with torch.no_grad():
        model[1].weight.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"scores must be finite, got .nan.*has diverged"):
        loop(model, feed, inputs, targets, 1)
    after = feed.sampler.summary() | feed.gradient.state_dict()
    np.testing.assert_equal(after | {"mean-age": 0}, before | {"mean-age": 0})


def test_full_pass_is_the_papers_first_step():
    torch.manual_seed(2)
    model = image_net()
    model(torch.randn(4, 1, 8, 8))
    inputs, targets = data(model)
    buffers = [b.clone() for b in model.buffers()]
    feed = PriorityFeed(PGDSampler(NUM, 4, rule="topk"), model, layers="all")
    for _ in range(2):  # the second one in the middle of training
        feed.full_pass(model, LOSS, inputs, targets, batch_size=7)
        assert feed.listener.collect() is None
        feed.next_batch()
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    model.eval()
    LOSS(model(inputs), targets).sum().backward()
    gradient = {n: p.grad for n, p in model.named_parameters()}
    for name, part in feed.gradient.direction.items():
        torch.testing.assert_close(part, gradient[name], rtol=1e-4, atol=1e-4)
    expected = sample_priorities(model, LOSS, inputs, targets, gradient)
    found = feed.sampler.draw.trend.priority
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-3, atol=1e-3)
    assert not feed.sampler.draw.is_warming_up


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("gradient.1.bias", np.full(5, np.nan, dtype=np.float32), "finite sums"),
        ("gradient_covered", -1.0, "finite sums"),
        ("gradient_covered", 25.0, "finite sums"),
        ("rule", "topk", "rule=stochastic, got topk"),
    ],
)
def test_damaged_state_is_refused(key, value, match):
    model, inputs, targets = small()
    feed = PriorityFeed(PGDSampler(NUM, 4, gate=0), model)
    state = feed.state_dict()
    loop(model, feed, inputs, targets, 5)
    before = feed.state_dict()
    with pytest.raises(ValueError, match=match):
        feed.load_state_dict({**state, key: value})
    after = feed.state_dict()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("model", "layers", "match"),
    [
        (nn.ReLU(), "last", "model must have parameters, got 'ReLU'"),
        (nn.Linear(2, 2), "first", "layers must be one of last, all"),
        (nn.LSTM(2, 2), "last", "must be linear in its parameters"),
        (
            nn.Sequential(nn.GRU(2, 2), nn.Linear(2, 2)),
            "all",
            "layer '0' must be linear in its parameters .* got 'GRU': take layers='last'",
        ),
    ],
)
def test_bad_arguments_are_refused(model, layers, match):
    with pytest.raises(ValueError, match=match):
        PriorityFeed(PGDSampler(4, 2), model, layers=layers)


def test_closed_gate_trains_as_uniform_sampling():
    results = []
    for draw in (PGDSampler(NUM, 4, seed=2, gate=1e9), UniformSampler(NUM, 4, seed=2)):
        model, inputs, targets = small()
        feed = PriorityFeed(draw, model) if isinstance(draw, PGDSampler) else draw
        loop(model, feed, inputs, targets, 70)
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- fed by the loss ---------------------------------------------------------------------


def measured_by_loss(layers, dtype=None, scale=1.0, steps=8):
    """Train on a loss that feeds; return what the sampler was told, and the aggregate."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.LayerNorm(9), nn.Linear(9, 5))
    inputs, targets = data(model)
    sampler = PGDSampler(NUM, 4, rule="topk")
    feed, told = PriorityFeed(sampler, model, layers=layers), []
    sampler.update = lambda *given: told.append(given)
    criterion, batches = WeightedLoss(feed), iter(feed)
    for _ in range(min(steps, len(feed))):
        indices = next(batches)
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
    for (indices, *found), (same, *expected) in zip(told, plain, strict=True):
        np.testing.assert_array_equal(indices, same)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=error * np.abs(other).max())
    for name, part in aggregate.items():
        torch.testing.assert_close(part, total[name], rtol=error, atol=error * 10)


def test_a_scalers_overflow_is_no_batch():
    told, total = measured_by_loss("last", torch.float16, 2.0**24)
    assert not told
    assert not any(part.any() for part in total.values())


def test_losses_without_a_backward_pass_teach_nothing():
    model, inputs, targets = small()
    feed = PriorityFeed(PGDSampler(NUM, 4, rule="topk"), model)
    criterion = WeightedLoss(feed)
    for indices in feed:
        criterion(model(inputs[indices]).detach(), targets[indices])
    losses = [criterion(model(inputs[indices]), targets[indices]) for indices in feed]
    losses[-1].backward()
    assert feed.state_dict()["batches"] == 1
    with pytest.raises(ValueError, match="indices must be of a batch drawn and not yet trained"):
        feed.on_batch(model, np.arange(4), losses[0])


def test_batches_that_are_only_taken_are_an_error():
    model, _, _ = small()
    feed = PriorityFeed(PGDSampler(NUM, 4), model)
    for _ in range(2):
        for _ in feed:
            feed.take()
    with pytest.raises(RuntimeError, match=r"PriorityFeed learns nothing(.|\n)*WeightedLoss"):
        next(iter(feed))


@pytest.mark.parametrize(("model", "by_forward_mode"), [(Tied, False), (TiedByHand, True)])
def test_layers_are_checked_once_in_all_rounds(model, by_forward_mode, caplog, monkeypatch):
    checks, check = [], LayerPriorities._error
    monkeypatch.setattr(
        LayerPriorities, "_error", lambda *given: (checks.append(1), check(*given))[1]
    )
    words, targets, state = torch.randint(5, (NUM, 4)), torch.arange(NUM) % 5, None
    for _ in range(3):
        net = model()
        feed = PriorityFeed(PGDSampler(NUM, 4, rule="topk"), net, layers="all")
        if state is not None:
            feed.load_state_dict(state)
        criterion = WeightedLoss(feed)
        for indices in feed:
            criterion(net(words[indices]), targets[indices]).backward()
        state = feed.state_dict()
        assert feed.listener.by_forward_mode == by_forward_mode
    assert len(checks) == 1
    assert len(caplog.records) == by_forward_mode


def test_a_model_in_bfloat16_by_forward_mode():
    net, words, targets = TiedByHand().bfloat16(), torch.randint(5, (NUM, 4)), torch.arange(NUM) % 5
    feed = PriorityFeed(PGDSampler(NUM, 4, rule="topk"), net, layers="all")
    feed.listener.by_forward_mode = True
    criterion = WeightedLoss(feed)
    for _ in range(2):
        for indices in feed:
            criterion(net(words[indices]), targets[indices]).backward()
    assert feed.summary()["coverage"] == 1.0


def test_full_pass_of_a_model_in_bfloat16():
    model, inputs, targets = small()
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        feed = PriorityFeed(PGDSampler(NUM, 4, rule="topk"), model.to(dtype))
        feed.full_pass(model, LOSS, inputs.to(dtype), targets)
        found.append(feed.state_dict()["gradient.1.weight"])
    assert found[1].dtype == np.float32
    np.testing.assert_allclose(found[1], found[0], atol=0.05 * np.abs(found[0]).max())

"""Priorities in one pass against one autograd call per example."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from oracles.pgd import one_by_one
from torch import nn
from torch.nn.functional import cross_entropy

from flwr_hetero.pgd.priorities import METHODS, all_priorities
from flwr_hetero.sampler import sample_priorities

BATCH = 6
LOSS = nn.CrossEntropyLoss(reduction="none")
TARGETS = torch.arange(BATCH) % 5


def some_direction(model):
    return {name: torch.randn_like(p) for name, p in model.named_parameters()}


def images(*layers):
    inputs = torch.randn(BATCH, 3, 8, 8)
    body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *layers, nn.Flatten())
    return nn.Sequential(body, nn.Linear(body(inputs).shape[1], 5)), inputs


class Sequence(nn.Module):
    """A recurrent net or a transformer with a linear head."""

    def __init__(self, body):
        super().__init__()
        self.body, self.head = body, nn.LazyLinear(5)

    def forward(self, inputs):
        out = self.body(inputs)
        return self.head((out[0] if isinstance(out, tuple) else out).mean(1))


def sequences(body):
    model, inputs = Sequence(body), torch.randn(BATCH, 7, 8)
    model(inputs)
    return model, inputs


def words(body):
    return nn.Sequential(body, nn.Flatten(), nn.LazyLinear(5)), torch.randint(9, (BATCH, 4))


EXACT = {
    "mlp": lambda: (
        nn.Sequential(nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 5)),
        torch.randn(BATCH, 9),
    ),
    "cnn": lambda: images(nn.ReLU(), nn.MaxPool2d(2)),
    "depthwise": lambda: images(nn.Conv2d(4, 8, 3, groups=4), nn.AdaptiveAvgPool2d(3)),
    "group norm": lambda: images(nn.GroupNorm(2, 4)),
    "layer norm": lambda: images(nn.LayerNorm(8)),
    "instance norm": lambda: images(nn.InstanceNorm2d(4, affine=True)),
    "batch norm": lambda: images(nn.BatchNorm2d(4)),
    "embedding": lambda: words(nn.Embedding(9, 6)),
    "gru": lambda: sequences(nn.GRU(8, 6, batch_first=True)),
    "transformer": lambda: sequences(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    ),
    "embedding bag": lambda: words(nn.EmbeddingBag(9, 6)),
    "lstm": lambda: sequences(nn.LSTM(8, 6, batch_first=True)),
    "weight norm": lambda: (
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(9, 12)), nn.Linear(12, 5)),
        torch.randn(BATCH, 9),
    ),
}
EXACT["channels last"] = lambda: (
    images(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4))[0].to(memory_format=torch.channels_last),
    torch.randn(BATCH, 3, 8, 8),
)
NO_FORWARD_MODE = ("lstm", "weight norm", "embedding bag")


@pytest.mark.parametrize("name", EXACT)
def test_priorities_are_one_gradient_each(name):
    torch.manual_seed(0)
    model, inputs = EXACT[name]()
    model(inputs)
    model.eval()
    direction = some_direction(model)
    expected = one_by_one(model, LOSS, inputs, TARGETS, direction)
    error = 1e-3 if name == "embedding bag" else 1e-5  # nothing but differences is possible
    found = sample_priorities(model, LOSS, inputs, TARGETS, direction)
    torch.testing.assert_close(
        found, expected, rtol=error, atol=error * float(expected.abs().max())
    )
    assert not found.requires_grad
    impossible = pytest.raises(NotImplementedError) if name in NO_FORWARD_MODE else nullcontext()
    with impossible:
        sample_priorities(model, LOSS, inputs, TARGETS, direction, method="forward")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("training", [True, False])
def test_methods_agree(method, training):
    torch.manual_seed(1)
    model, inputs = EXACT["cnn"]()
    model.train(training)
    direction = some_direction(model)
    expected = one_by_one(model, LOSS, inputs, TARGETS, direction)
    found = sample_priorities(model, LOSS, inputs, TARGETS, direction, method=method)
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < (1e-3 if method == "difference" else 1e-6)


def test_parameters_left_out_do_not_move():
    torch.manual_seed(3)
    model, inputs = EXACT["mlp"]()
    direction = some_direction(model)
    last = {name: d for name, d in direction.items() if name.startswith("2.")}
    still = {name: d if name in last else torch.zeros_like(d) for name, d in direction.items()}
    torch.testing.assert_close(
        sample_priorities(model, LOSS, inputs, TARGETS, last),
        sample_priorities(model, LOSS, inputs, TARGETS, still),
    )


@pytest.mark.parametrize("method", METHODS)
def test_zero_direction_gives_zero(method):
    model, inputs = EXACT["mlp"]()
    zero = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    found = sample_priorities(model, LOSS, inputs, TARGETS, zero, method=method)
    assert found.tolist() == [0.0] * BATCH


class FunctionalDropout(nn.Module):
    def forward(self, inputs):
        return nn.functional.dropout(inputs, 0.5, self.training)


@pytest.mark.parametrize("method", METHODS)
def test_model_and_random_state_stay(method):
    torch.manual_seed(4)
    model, inputs = images(nn.BatchNorm2d(4), nn.Dropout(0.5), FunctionalDropout())
    model[0][2].eval()  # a user's own mix of modes
    model[0][2].train()
    model[0][1].momentum = 0.7
    direction = some_direction(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    sample_priorities(model, LOSS, inputs, TARGETS, direction, method=method)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.backends.mha.get_fastpath_enabled()
    model(inputs).sum().backward()  # still an ordinary model


def test_dropout_is_off_in_training():
    torch.manual_seed(5)
    model, inputs = images(nn.Dropout(0.5))
    direction = some_direction(model)
    still = sample_priorities(model.eval(), LOSS, inputs, TARGETS, direction)
    torch.testing.assert_close(
        sample_priorities(model.train(), LOSS, inputs, TARGETS, direction), still
    )


def test_functional_dropout_keeps_its_mask():
    torch.manual_seed(6)
    model, inputs = images(FunctionalDropout())
    direction = some_direction(model)
    torch.manual_seed(7)
    exact = sample_priorities(model, LOSS, inputs, TARGETS, direction, method="forward")
    torch.manual_seed(7)
    close = sample_priorities(model, LOSS, inputs, TARGETS, direction, method="difference")
    assert (close - exact).abs().max() < 1e-3 * exact.abs().max()


def test_batch_norm_counts_batch_statistics():
    torch.manual_seed(8)
    model, inputs = images(nn.BatchNorm2d(4))
    step, direction = 1e-3, some_direction(model)
    found = sample_priorities(model.train(), LOSS, inputs, TARGETS, direction)
    losses = []
    for moved in (step, -2 * step):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p += moved * direction[name]
            losses.append(LOSS(model(inputs), TARGETS))
    expected = (losses[0] - losses[1]) / (2 * step)
    assert (found - expected).abs().max() < 1e-2 * expected.abs().max()


def diverged(outputs, targets):
    return cross_entropy(outputs, targets, reduction="none") * float("nan")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model": nn.ReLU()}, "model must have parameters, got 'ReLU'"),
        ({"direction": {}}, "direction must name at least one parameter"),
        ({"direction": {"4.weight": torch.ones(1)}}, "must use the model's parameter names"),
        (
            {"direction": {"0.bias": torch.ones(3)}},
            r"direction\['0.bias'\] must have the shape \(12,\) of the parameter, got \(3,\)",
        ),
        (
            {"direction": {"0.bias": torch.full((12,), torch.nan)}},
            "direction must give finite priorities, got .nan, nan, nan.: the gradient has diverged",
        ),
        ({"loss_fn": nn.CrossEntropyLoss()}, r"loss_fn must return one loss per example"),
        ({"loss_fn": diverged}, "loss_fn must return finite losses, got .nan, nan, nan."),
        ({"method": "guess"}, "method must be one of"),
    ],
)
def test_bad_arguments_are_refused(change, match):
    model, inputs = EXACT["mlp"]()
    arguments = {"model": model, "loss_fn": LOSS, "inputs": inputs, "targets": TARGETS}
    arguments["direction"] = some_direction(model)
    with pytest.raises(ValueError, match=match):
        sample_priorities(**(arguments | change))


def test_error_of_the_model_is_raised():
    model, inputs = EXACT["mlp"]()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        sample_priorities(model, LOSS, inputs[:, :3], TARGETS, some_direction(model))
    assert caught.value.__context__ is None  # no other method was tried


def test_all_priorities_skip_frozen_parameters():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    inputs, targets = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])
    found, total = all_priorities(model, LOSS, inputs, targets, batch_size=2)
    last = {name for name in total if name.startswith("2.")}
    alone, gradient = all_priorities(model, LOSS, inputs, targets, names=last)
    assert not any(total[name].any() for name in set(total) - last)
    assert all(torch.allclose(total[name], gradient[name]) for name in last)
    np.testing.assert_allclose(found, alone, rtol=1e-6)
    assert found.sum() == pytest.approx(sum(float(g.square().sum()) for g in gradient.values()))

"""Priorities in one pass, and from the layers of a training step, against one call per example."""

import numpy as np
import pytest
import torch
from oracles.pgd import one_by_one
from pgd.nets import LOSS, Tied, data, image_net, some_direction
from torch import nn
from torch.nn.functional import linear

from flwr_hetero.pgd.priorities import LayerPriorities, all_priorities
from flwr_hetero.sampler import sample_priorities

BATCH = 6
TARGETS = torch.arange(BATCH) % 5


class Flat(nn.Module):
    def forward(self, out):
        return (out[0] if isinstance(out, tuple) else out).flatten(1)


def with_head(body, inputs):
    model = nn.Sequential(body, Flat(), nn.LazyLinear(5))
    model(inputs)
    return model, inputs


def images(*layers):
    body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *layers)
    return with_head(body, torch.randn(BATCH, 3, 8, 8))


def sequences(body):
    return with_head(body, torch.randn(BATCH, 7, 8))


def embedded(body):
    return with_head(body, torch.randint(9, (BATCH, 4)))


def mlp(first=None):
    layers = (first or nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 5))
    return nn.Sequential(*layers), torch.randn(BATCH, 9)


EXACT = {
    "mlp": mlp,
    "cnn": lambda: images(nn.ReLU(), nn.MaxPool2d(2)),
    "group norm": lambda: images(nn.GroupNorm(2, 4)),
    "batch norm": lambda: images(nn.BatchNorm2d(4)),
    "embedding": lambda: embedded(nn.Embedding(9, 6)),
    "tied": lambda: (Tied(), torch.randint(5, (BATCH, 4))),
    "tied, padded": lambda: (Tied(padding_idx=0), torch.randint(3, (BATCH, 4))),
    "gru": lambda: sequences(nn.GRU(8, 6, batch_first=True)),
    "transformer": lambda: sequences(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    ),
    "channels last": lambda: (
        images(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4))[0].to(memory_format=torch.channels_last),
        torch.randn(BATCH, 3, 8, 8),
    ),
}
NO_FORWARD_MODE = {
    "embedding bag": lambda: embedded(nn.EmbeddingBag(9, 6)),
    "lstm": lambda: sequences(nn.LSTM(8, 6, batch_first=True)),
    "weight norm": lambda: mlp(nn.utils.parametrizations.weight_norm(nn.Linear(9, 12))),
}


@pytest.mark.parametrize("name", EXACT)
def test_priorities_are_one_gradient_each(name):
    torch.manual_seed(0)
    model, inputs = EXACT[name]()
    direction = some_direction(model.eval())
    expected = one_by_one(model, LOSS, inputs, TARGETS, direction)
    found = sample_priorities(model, LOSS, inputs, TARGETS, direction)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert not found.requires_grad


@pytest.mark.parametrize("name", NO_FORWARD_MODE)
def test_models_without_a_forward_mode_are_refused(name):
    model, inputs = NO_FORWARD_MODE[name]()
    with pytest.raises(ValueError, match="model must be of layers that torch differentiates in fo"):
        sample_priorities(model, LOSS, inputs, TARGETS, some_direction(model))


class FunctionalDropout(nn.Module):
    def forward(self, inputs):
        return nn.functional.dropout(inputs, 0.5, self.training)


def test_model_and_random_state_stay():
    torch.manual_seed(4)
    model, inputs = images(nn.BatchNorm2d(4), nn.Dropout(), nn.Dropout(), FunctionalDropout())
    model[0][2].eval()  # a user's own mix of modes
    direction = some_direction(model)

    def state():
        modes = [torch.tensor(module.training) for module in model.modules()]
        return [*model.state_dict().values(), *modes, torch.get_rng_state()]

    before = [value.clone() for value in state()]
    sample_priorities(model, LOSS, inputs, TARGETS, direction)
    assert all(map(torch.equal, state(), before))
    assert all(p.grad is None for p in model.parameters())
    assert torch.backends.mha.get_fastpath_enabled()
    model(inputs).sum().backward()  # still an ordinary model


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"direction": {}}, "direction must name at least one parameter"),
        ({"direction": {"4.weight": torch.ones(1)}}, "direction must be one of .*got .'4.weight'"),
        ({"direction": {"0.bias": torch.ones(3)}}, r"one of .*'0.bias', \(12,\).*got .'0.bias'"),
        (
            {"direction": {"0.bias": torch.full((12,), torch.nan)}},
            "direction must give .* got .nan",
        ),
        ({"loss_fn": nn.CrossEntropyLoss()}, r"loss_fn must return one loss per example"),
        ({"loss_fn": lambda *given: LOSS(*given) * torch.nan}, "loss_fn must give finite numbers"),
    ],
)
def test_bad_arguments_are_refused(change, match):
    model, inputs = mlp()
    arguments = {"model": model, "loss_fn": LOSS, "inputs": inputs, "targets": TARGETS}
    arguments["direction"] = some_direction(model)
    with pytest.raises(ValueError, match=match):
        sample_priorities(**(arguments | change))


def test_all_priorities_skip_frozen_parameters():
    torch.manual_seed(0)
    model, inputs = mlp()
    model[0].requires_grad_(False)
    found, total = all_priorities(model, LOSS, inputs, TARGETS, batch_size=2)
    alone, last = all_priorities(model, LOSS, inputs, TARGETS, names={"2.weight", "2.bias"})
    zeros = {f"0.{name}": torch.zeros_like(p) for name, p in model[0].named_parameters()}
    torch.testing.assert_close(total, zeros | last)
    np.testing.assert_allclose(found, alone, rtol=1e-6)
    assert found.sum() == pytest.approx(sum(float(g.square().sum()) for g in last.values()))


def aimed(model, layers="last"):
    """Make a listener with a random direction."""
    listener = LayerPriorities(model, layers)
    listener.direction = {n: torch.randn_like(p) for n, p in listener.parameters.items()}
    return listener


def backward(model, inputs, targets):
    LOSS(model(inputs), targets).sum().backward()


@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.parametrize("make", [image_net, Tied])
def test_layer_priorities_equal_forward_mode(make, layers):
    torch.manual_seed(0)
    model = make().eval()
    inputs, targets = data(model)
    listener = aimed(model, layers)
    backward(model, inputs, targets)
    found = listener.collect(len(inputs))
    expected = sample_priorities(model, LOSS, inputs, targets, listener.direction)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len(listener.direction) == (1 if make is Tied else 2 if layers == "last" else 14)
    assert listener.collect(len(inputs)) is None


class Words(nn.Module):
    """Embedding, perhaps an LSTM, which has no forward mode, and a head: used in some ``way``."""

    def __init__(self, way, recurrent=False):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.way = way
        self.lstm = nn.LSTM(6, 6, batch_first=True) if recurrent else None
        self.head = nn.Linear(6, 9)

    def forward(self, words):
        steps = self.embed(words)
        return self.way(self, self.lstm(steps)[0] if self.lstm else steps)


def time_first(self, steps):
    return self.head(steps.transpose(0, 1)).mean(0)


def flattened(self, steps):
    return self.head(steps.flatten(0, 1)).unflatten(0, steps.shape[:2]).mean(1)


def tied_by_hand(self, steps):
    return linear(self.head(steps).tanh().mean(1)[:, :6], self.embed.weight)


@pytest.mark.parametrize(
    ("way", "layers", "match"),
    [
        (time_first, "all", "have the 8 examples in the first dim.* got .7.: call sample_prior"),
        (flattened, "last", "have the 8 examples .* got .56."),
        (tied_by_hand, "all", "use parameters that priorities count in their layers only"),
    ],
)
def test_models_whose_layers_do_not_tell_are_refused_at_once(way, layers, match):
    model = Words(way)
    listener = aimed(model, layers)
    backward(model, torch.randint(9, (8, 7)), torch.arange(8) % 5)
    with pytest.raises(ValueError, match=f"model must {match}"):
        listener.collect(8)

"""Priorities in one pass, and from the layers of a training step, against one call per example."""

import logging

import numpy as np
import pytest
import torch
from oracles.pgd import one_by_one
from pgd.nets import (
    LOSS,
    Flattened,
    Recurrent,
    Tied,
    TiedByHand,
    TimeMajor,
    WithOptions,
    data,
    image_net,
    some_direction,
)
from torch import nn

from flwr_hetero.pgd.priorities import LayerPriorities, all_priorities
from flwr_hetero.sampler import sample_priorities

BATCH = 6
TARGETS = torch.arange(BATCH) % 5


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
    model, inputs = (
        nn.Sequential(body, nn.Flatten(), nn.LazyLinear(5)),
        torch.randint(9, (BATCH, 4)),
    )
    model(inputs)
    return model, inputs


def mlp(first=None):
    layers = (first or nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 5))
    return nn.Sequential(*layers), torch.randn(BATCH, 9)


EXACT = {
    "mlp": mlp,
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
    "channels last": lambda: (
        images(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4))[0].to(memory_format=torch.channels_last),
        torch.randn(BATCH, 3, 8, 8),
    ),
}
NO_FORWARD_MODE = {
    "embedding bag": lambda: words(nn.EmbeddingBag(9, 6)),
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


def test_parameters_left_out_do_not_move():
    torch.manual_seed(3)
    model, inputs = mlp()
    direction = some_direction(model)
    last = {name: d for name, d in direction.items() if name.startswith("2.")}
    still = {name: d if name in last else torch.zeros_like(d) for name, d in direction.items()}
    found = [sample_priorities(model, LOSS, inputs, TARGETS, d) for d in (last, still)]
    torch.testing.assert_close(*found)
    zero = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert sample_priorities(model, LOSS, inputs, TARGETS, zero).tolist() == [0.0] * BATCH


class FunctionalDropout(nn.Module):
    def forward(self, inputs):
        return nn.functional.dropout(inputs, 0.5, self.training)


def test_model_and_random_state_stay():
    torch.manual_seed(4)
    model, inputs = images(nn.BatchNorm2d(4), nn.Dropout(0.5), FunctionalDropout())
    model[0][2].eval()  # a user's own mix of modes
    model[0][2].train()
    model[0][1].momentum = 0.7
    direction = some_direction(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    sample_priorities(model, LOSS, inputs, TARGETS, direction)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.backends.mha.get_fastpath_enabled()
    model(inputs).sum().backward()  # still an ordinary model


def test_training_mode_counts_batch_norm_but_no_dropout():
    torch.manual_seed(8)
    model, inputs = images(nn.BatchNorm2d(4), nn.Dropout(0.5))
    step, direction = 1e-3, some_direction(model)
    found = sample_priorities(model.train(), LOSS, inputs, TARGETS, direction)
    model[0][2].eval()
    losses = []
    for moved in (step, -2 * step):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p += moved * direction[name]
            losses.append(LOSS(model(inputs), TARGETS))
    expected = (losses[0] - losses[1]) / (2 * step)
    assert (found - expected).abs().max() < 1e-2 * expected.abs().max()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model": nn.ReLU()}, r"direction must use the model's parameter names \[\]"),
        ({"direction": {}}, "direction must name at least one parameter"),
        ({"direction": {"4.weight": torch.ones(1)}}, "must use the model's parameter names"),
        ({"direction": {"0.bias": torch.ones(3)}}, r"\['0.bias'\] must have the shape \(12,\) of"),
        (
            {"direction": {"0.bias": torch.full((12,), torch.nan)}},
            "direction must give finite priorities, got .nan, nan, nan.: the model has diverged",
        ),
        ({"loss_fn": nn.CrossEntropyLoss()}, r"loss_fn must return one loss per example"),
        ({"loss_fn": lambda *given: LOSS(*given) * torch.nan}, "loss_fn must return finite losses"),
    ],
)
def test_bad_arguments_are_refused(change, match):
    model, inputs = mlp()
    arguments = {"model": model, "loss_fn": LOSS, "inputs": inputs, "targets": TARGETS}
    arguments["direction"] = some_direction(model)
    with pytest.raises(ValueError, match=match):
        sample_priorities(**(arguments | change))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # the model's own
        sample_priorities(model, LOSS, inputs[:, :3], TARGETS, some_direction(model))


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


# --- from the layers of a training step -----------------------------------------------------


def aimed(model, layers="last"):
    """Make a listener with a random direction."""
    listener = LayerPriorities(model, layers)
    listener.direction = {n: torch.randn_like(p) for n, p in listener.parameters.items()}
    return listener


@pytest.mark.parametrize(
    ("make", "layers"), [(image_net, "last"), (image_net, "all"), (Tied, "all")]
)
def test_layer_priorities_equal_forward_mode(make, layers):
    torch.manual_seed(0)
    model = make().eval()
    inputs, targets = data(model)
    listener = aimed(model, layers)
    LOSS(model(inputs), targets).sum().backward()
    found = listener.collect(len(inputs))
    expected = sample_priorities(model, LOSS, inputs, targets, listener.direction)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (len(listener.direction) == 2) == (layers == "last")
    assert listener.collect(len(inputs)) is None
    assert not listener.by_forward_mode


def test_nothing_is_measured_without_gradients():
    model = image_net()
    inputs, targets = data(model)
    listener = aimed(model)
    with torch.no_grad():
        model(inputs)
    assert listener.collect(len(inputs)) is None
    listener.close()
    LOSS(model(inputs), targets).mean().backward()
    assert listener.collect(len(inputs)) is None


def run(model, words, targets):
    found = model(words=words) if isinstance(model, WithOptions) else model(words)
    return LOSS(found["logits"] if isinstance(found, dict) else found, targets)


@pytest.mark.parametrize(
    ("make", "length"),
    [
        (TimeMajor, 8),  # as long as the batch is large: no error of torch's
        (TimeMajor, 7),
        (Flattened, 8),
        (TiedByHand, 8),
        (WithOptions, 8),
    ],
)
def test_forward_mode_takes_over_with_one_warning(make, length, caplog):
    torch.manual_seed(0)
    model = make()
    words, targets = torch.randint(9, (8, length)), torch.arange(8) % 5
    listener, factors = LayerPriorities(model, "all"), torch.linspace(0.5, 2.0, 8)
    for _ in range(3):
        listener.direction = some_direction(model)
        (run(model, words, targets) * factors).sum().backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        found = listener.collect(8)
        assert all(map(torch.equal, gradients, (p.grad for p in model.parameters())))
        plain = TiedByHand() if make is WithOptions else model
        plain.load_state_dict(model.state_dict())
        expected = sample_priorities(plain, LOSS, words, targets, listener.direction)
        torch.testing.assert_close(found / factors, expected, rtol=1e-4, atol=1e-4)
    assert listener.by_forward_mode
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert "layers='all' does not measure" in warning.message


@pytest.mark.parametrize("flattens", [False, True])
def test_the_last_layer_of_an_lstm_is_measured(flattens, caplog):
    torch.manual_seed(0)
    model, words, targets = Recurrent(flattens), torch.randint(9, (8, 3)), torch.arange(8) % 5
    listener = aimed(model)
    LOSS(model(words), targets).sum().backward()
    found = listener.collect(8)
    expected = one_by_one(model, LOSS, words, targets, {
        n: listener.direction.get(n, torch.zeros_like(p)) for n, p in model.named_parameters()
    })  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert listener.is_checked
    assert listener.by_forward_mode == flattens == len(caplog.records)


class Dropped(nn.Sequential):
    """Random in training, and its examples depend on each other."""

    def __init__(self):
        norm = (nn.BatchNorm1d(9), nn.Dropout())
        super().__init__(nn.Flatten(), nn.Linear(64, 9), *norm, nn.Linear(9, 5))


@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.parametrize("make", [Dropped, image_net])
def test_layers_that_know_disturb_nothing(make, layers, caplog):
    torch.manual_seed(0)
    model = make()
    inputs, targets = data(model)
    state, listener, results = torch.get_rng_state(), LayerPriorities(model, layers), []
    for direction in ({}, {n: torch.randn_like(p) for n, p in listener.parameters.items()}):
        torch.set_rng_state(state)
        model.zero_grad()
        listener.direction = direction
        LOSS(model(inputs), targets).sum().backward()
        buffers = [b.clone() for b in model.buffers()]
        listener.collect(len(inputs))
        assert all(map(torch.equal, buffers, model.buffers()))
        results.append([p.grad for p in model.parameters()] + [torch.get_rng_state()])
    assert all(map(torch.equal, *results))
    assert listener.is_checked
    assert not listener.by_forward_mode
    assert model.training
    assert not caplog.records


def test_batches_of_others_do_not_count():
    model = nn.Linear(3, 2)
    inputs, targets = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    listener = aimed(model)
    LOSS(model(torch.randn(7, 3)), torch.zeros(7, dtype=torch.int64)).sum().backward()
    LOSS(model(inputs), targets).sum().backward()
    found = listener.collect(4)
    expected = sample_priorities(model, LOSS, inputs, targets, listener.direction)
    torch.testing.assert_close(found, expected)


def test_a_model_called_in_parts_cannot_be_checked(caplog):
    model = TimeMajor()
    targets, listener = torch.arange(4), aimed(model, "all")
    LOSS(model.forward(torch.randint(9, (4, 3))), targets).sum().backward()
    with pytest.raises(ValueError, match="model must have the 4 examples in its first dimension"):
        listener.collect(4)
    for _ in range(2):
        LOSS(model.forward(torch.randint(9, (4, 4))), targets).sum().backward()
        assert listener.collect(4) is not None
    assert [record.message for record in caplog.records] == [
        "layers='all' cannot be checked: the model is not called as a whole."
    ]

"""Priorities from the layers of a training step, and forward mode where these cannot know."""

import logging

import pytest
import torch
from pgd.nets import LOSS, Tied, TiedByHand, data, image_net
from torch import nn

from flwr_hetero.pgd.layer_priorities import LayerPriorities
from flwr_hetero.sampler import sample_priorities


@pytest.mark.parametrize(
    ("make", "layers"), [(image_net, "last"), (image_net, "all"), (Tied, "all")]
)
def test_layer_priorities_equal_forward_mode(make, layers):
    torch.manual_seed(0)
    model = make().eval()
    inputs, targets = data(model)
    everything = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    listener = LayerPriorities(model, layers)
    direction = {name: everything[name] for name in listener.parameters}
    listener.direction = direction
    LOSS(model(inputs), targets).sum().backward()
    found = listener.collect()
    expected = sample_priorities(model, LOSS, inputs, targets, direction)
    torch.testing.assert_close(found.priorities, expected, rtol=1e-4, atol=1e-4)
    outputs = model(inputs).detach().requires_grad_()
    LOSS(outputs, targets).sum().backward()
    torch.testing.assert_close(found.norms, outputs.grad.norm(dim=1))
    assert (len(direction) == 2) == (layers == "last")
    assert listener.collect() is None


def test_hooks_change_neither_gradients_nor_buffers():
    results = []
    for hooked in (True, False):
        torch.manual_seed(0)
        model = image_net()
        inputs, targets = data(model)
        if hooked:
            listener = LayerPriorities(model, "all")
            listener.direction = {n: torch.randn_like(p) for n, p in model.named_parameters()}
        LOSS(model(inputs), targets).mean().backward()
        results.append([p.grad for p in model.parameters()] + list(model.buffers()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_nothing_is_measured_without_gradients():
    model = image_net()
    inputs, targets = data(model)
    listener = LayerPriorities(model)
    listener.direction = {n: torch.ones_like(p) for n, p in listener.parameters.items()}
    with torch.no_grad():
        model(inputs)
    assert listener.collect() is None
    listener.close()
    LOSS(model(inputs), targets).mean().backward()
    assert listener.collect() is None


# --- models whose layers do not have the examples first ----------------------------------


class TimeMajor(nn.Module):
    """Time comes first between embedding and head."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, words):
        return self.head(self.mix(self.embed(words).transpose(0, 1)).tanh().mean(0))


class Flattened(TimeMajor):
    """Steps of all examples are rows of one matrix."""

    def forward(self, words):
        steps = self.mix(self.embed(words).flatten(0, 1)).tanh()
        return self.head(steps.unflatten(0, words.shape).mean(1))


class WithOptions(TiedByHand):
    """Called with names, returns names: as Hugging Face's models."""

    def forward(self, *, words):
        return {"loss": torch.zeros(()), "logits": super().forward(words)}


def run(model, words, targets):
    found = model(words=words) if isinstance(model, WithOptions) else model(words)
    return LOSS(found["logits"] if isinstance(found, dict) else found, targets)


@pytest.mark.parametrize(
    ("make", "layers", "length"),
    [
        (TimeMajor, "all", 8),  # as long as the batch is large: no error of torch's
        (TimeMajor, "all", 7),
        (Flattened, "all", 8),
        (TiedByHand, "all", 8),
        (WithOptions, "all", 8),
    ],
)
def test_forward_mode_takes_over_with_one_warning(make, layers, length, caplog):
    torch.manual_seed(0)
    model = make()
    words, targets = torch.randint(9, (8, length)), torch.arange(8) % 5
    listener = LayerPriorities(model, layers)
    factors = torch.linspace(0.5, 2.0, 8)
    for _ in range(3):
        listener.direction = {n: torch.randn_like(p) for n, p in listener.parameters.items()}
        (run(model, words, targets) * factors).sum().backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        found = listener.collect(8)
        assert all(map(torch.equal, gradients, (p.grad for p in model.parameters())))
        plain = TiedByHand() if make is WithOptions else model
        plain.load_state_dict(model.state_dict())
        expected = sample_priorities(plain, LOSS, words, targets, listener.direction)
        torch.testing.assert_close(found.priorities / factors, expected, rtol=1e-4, atol=1e-4)
        assert found.norms.shape == (8,)
    assert listener.by_forward_mode
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert f"layers={layers!r} does not measure" in warning.message


class Dropped(nn.Sequential):
    """Random in training, and its examples depend on each other."""

    def __init__(self):
        super().__init__(
            nn.Flatten(), nn.Linear(64, 9), nn.BatchNorm1d(9), nn.Dropout(), nn.Linear(9, 5)
        )


@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.parametrize("make", [Dropped, image_net])
def test_layers_that_know_are_believed(make, layers, caplog):
    torch.manual_seed(0)
    model = make()
    inputs, targets = data(model)
    state = torch.get_rng_state()
    listener = LayerPriorities(model, layers)
    results = []
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
    listener = LayerPriorities(model)
    listener.direction = {n: torch.ones_like(p) for n, p in listener.parameters.items()}
    LOSS(model(torch.randn(7, 3)), torch.zeros(7, dtype=torch.int64)).sum().backward()
    LOSS(model(inputs), targets).sum().backward()
    found = listener.collect(4)
    expected = sample_priorities(model, LOSS, inputs, targets, listener.direction)
    torch.testing.assert_close(found.priorities, expected)


def test_a_model_called_in_parts_cannot_be_checked(caplog):
    model = TimeMajor()
    words, targets = torch.randint(9, (4, 3)), torch.arange(4)
    listener = LayerPriorities(model, "all")
    listener.direction = {n: torch.ones_like(p) for n, p in listener.parameters.items()}
    LOSS(model.forward(words), targets).sum().backward()
    with pytest.raises(ValueError, match="model must have the 4 examples in its first dimension"):
        listener.collect(4)
    square = torch.randint(9, (4, 4))
    for _ in range(2):
        LOSS(model.forward(square), targets).sum().backward()
        assert listener.collect(4) is not None
    assert [record.message for record in caplog.records] == [
        "layers='all' cannot be checked: the model is not called as a whole."
    ]

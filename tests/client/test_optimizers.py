"""A node's torch optimizers continue from slice to slice, as its pass over the data does."""

import copy

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from node_toy import Node
from torch import nn
from toy import reply_with

from flwr_hetero import keys
from flwr_hetero.client import _warned
from flwr_hetero.client import carried as carried_module
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import hetero
from flwr_hetero.strategy import FedSlice

BATCHES = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(12)]
MAKERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),  # states of other shapes
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "two groups": lambda p: torch.optim.SGD(
        [{"params": [x], "lr": lr} for x, lr in zip(p, (0.1, 0.2), strict=True)], 0.1, 0.9
    ),
}
MOMENTUM = MAKERS["momentum"]
TWO = [
    lambda parts: torch.optim.SGD(parts[:1], lr=0.1, momentum=0.9),
    lambda parts: torch.optim.Adam(parts[1:], lr=0.01),
]


def fresh(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(3, 2, dtype=dtype)


def train(model, optimizers, batches):
    for x, y in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(model.weight.dtype)), y).backward()
        for optimizer in optimizers:
            optimizer.step()


class Trainer(Node):
    """A node whose optimizers are new in each message, and whose model goes on."""

    def __init__(self, *makers, dtype=torch.float32):
        super().__init__(self.fit)
        self.model = fresh(dtype)
        self.makers = makers
        self.made = []

    def fit(self, msg, context):
        self.made = [make(list(self.model.parameters())) for make in self.makers]
        train(self.model, self.made, hetero.batches(BATCHES, msg))

    def fits(self, *steps, keep=True):
        for asked in steps:
            self.ask(asked, **{keys.KEEP_OPTIMIZER: keep})
        return self

    @property
    def weights(self):
        return np.concatenate([p.detach().float().numpy().ravel() for p in self.model.parameters()])


@pytest.mark.parametrize("name", [*MAKERS, "two optimizers", "bfloat16"])
def test_three_messages_are_as_one(name):
    makers = TWO if name == "two optimizers" else [MAKERS.get(name, MOMENTUM)]
    # NumPy lacks this type of numbers.
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    parts, whole = (Trainer(*makers, dtype=dtype).fits(*steps) for steps in ((2, 4, 3), (9,)))
    np.testing.assert_allclose(parts.weights, whole.weights, rtol=1e-6)
    other = Trainer(*makers, dtype=dtype).fits(2, 4, 3, keep=False)
    assert np.abs(other.weights - whole.weights).max() > 1e-3


def test_rates_are_those_of_the_new_optimizer():
    rates = iter([0.1, 0.5])
    node = Trainer(lambda parts: torch.optim.SGD(parts, next(rates), momentum=0.9)).fits(3, 1)
    model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, [optimizer], BATCHES[:3])
    optimizer.param_groups[0]["lr"] = 0.5
    train(model, [optimizer], BATCHES[3:4])
    np.testing.assert_allclose(node.weights[:6], model.weight.detach().numpy().ravel(), rtol=1e-6)


def test_an_optimizer_that_the_app_carries_on_keeps_its_state():
    own = []

    def carried(parts):
        optimizer = torch.optim.SGD(parts, lr=0.1, momentum=0.9)
        if own:
            optimizer.load_state_dict(own[-1])
        return optimizer

    node = Trainer(carried).fits(3)
    own.append(copy.deepcopy(node.made[0].state_dict()))
    for entries in own[0]["state"].values():
        entries["momentum_buffer"].fill_(7.0)
    node.fits(1)
    assert float(node.made[0].state[node.model.weight]["momentum_buffer"].min()) > 5.0


def test_a_node_recovers_from_a_state_that_is_no_number_or_of_another_model(caplog):
    _warned.clear()
    node = Trainer(MOMENTUM)
    with torch.no_grad():
        node.model.weight.fill_(float("nan"))
    assert np.isnan(node.fits(2).weights).any()
    node.model = fresh()
    assert np.isfinite(node.fits(2).weights).all()
    assert "of another model" not in caplog.text
    node.model = nn.Linear(3, 4)
    node.fits(1)
    assert "of another model" in caplog.text


def test_a_state_too_large_for_a_message_begins_anew_and_is_warned(caplog, monkeypatch):
    _warned.clear()
    monkeypatch.setattr(carried_module, "MOST_BYTES", 99)
    parts = Trainer(MOMENTUM).fits(3, 3)
    anew = Trainer(MOMENTUM).fits(3, 3, keep=False)
    np.testing.assert_array_equal(parts.weights, anew.weights)
    assert "GB are too much" in caplog.text


app = ClientApp(mods=[hetero])


@app.train()
def answer(msg: Message, context: Context) -> Message:
    """Train as users' apps do: the optimizer is new in each message."""
    model = fresh()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    train(model, [MOMENTUM(model.parameters())], hetero.batches(BATCHES, msg))
    arrays = dict(ArrayRecord(model.state_dict()))
    return reply_with(msg, {"num-examples": 8 * len(BATCHES)}, arrays)


def test_slices_of_one_node_are_sequential_training_with_momentum():
    def trained(**how):
        strategy = FedSlice(FedAvg(fraction_evaluate=0.0), slice_steps=5, window=1, **how)
        grid = LocalGrid(app, [DeviceProfile()])
        return strategy.start(grid, ArrayRecord(fresh().state_dict()), 3).arrays

    found = trained()
    model = fresh()
    # two steps to be timed, then slices of five until 36 have been taken
    train(model, [MOMENTUM(model.parameters())], (BATCHES * 4)[:37])
    for name, array in ArrayRecord(model.state_dict()).items():
        np.testing.assert_allclose(found[name].numpy(), array.numpy(), rtol=1e-4, atol=1e-6)
    other = trained(keep_optimizer=False)
    assert np.abs(other["weight"].numpy() - found["weight"].numpy()).max() > 1e-3

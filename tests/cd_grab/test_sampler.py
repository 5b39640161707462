"""OrderedSampler: units, weights, orders, what it says to the server, state."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from flwr_hetero import keys
from flwr_hetero.cd_grab.gradients import batch_gradient
from flwr_hetero.cd_grab.sampler import METHODS, OrderedSampler
from flwr_hetero.cd_grab.wire import Answer, Terms, write_instruction
from flwr_hetero.sampler import WeightedLoss


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("num_samples", "options", "num_units", "num_batches"),
    [
        (40, {}, 5, 5),
        (47, {}, 6, 6),
        (3, {}, 1, 1),
        (40, {"num_units": 7}, 7, 7),
        (20, {"unit": "example"}, 20, 3),
    ],
)
def test_pass_is_the_mean_over_all_examples(method, num_samples, options, num_units, num_batches):
    sampler = OrderedSampler(num_samples, 8, seed=3, method=method, **options)
    assert (len(sampler.units), len(sampler)) == (num_units, num_batches)
    total = np.zeros(num_samples)
    seen = []
    for _ in range(num_batches):
        before = sampler.node_order.position
        indices, weights = sampler.next_batch()
        units = sampler.node_order.position - before
        total[indices] += units * weights / len(indices)  # in a step's mean, times its units
        seen += indices.tolist()
    assert sorted(seen) == list(range(num_samples))
    np.testing.assert_allclose(total, num_units / num_samples)


def run_pass(sampler, gradients):
    """Visit every batch; each unit's gradient is the mean of its examples'."""
    visited = []
    for _ in range(len(sampler)):
        indices, _ = sampler.next_batch()
        visited += indices.tolist()
        rows = gradients[indices]
        sampler.observe(rows if sampler.unit == "example" else rows.mean(dim=0, keepdim=True))
    return visited


@pytest.mark.parametrize(
    ("options", "asked", "num_units"),
    [({}, 4, 4), ({}, 50, 12), ({"unit": "example"}, 4, 12), ({"method": "id-grab"}, 3, 6)],
)
def test_server_may_set_the_number_of_units(options, asked, num_units):
    sampler = OrderedSampler(12, 2, **options)
    sampler.follow(write_instruction(Terms(num_units=asked), Answer()))
    assert len(sampler.units) == num_units
    run_pass(sampler, torch.randn(12, 3))
    assert sampler.report().get(keys.NUM_UNITS, num_units) == num_units


DATA = TensorDataset(torch.randn(22, 4, generator=torch.manual_seed(0)), torch.arange(22) % 3)
MODEL = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
START = {name: value.clone() for name, value in MODEL.state_dict().items()}


def trained(**options):
    """Make a sampler that learns from the loss of a new model."""
    MODEL.load_state_dict(START)
    sampler = OrderedSampler(22, 3, **options)
    sampler.train_model(MODEL)
    return sampler, WeightedLoss(sampler)


def by_hand(method, passes):
    """Train with observe() after each backward pass."""
    sampler, _ = trained(method=method)
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    for _ in range(passes * len(sampler)):
        indices, weights = sampler.next_batch()
        inputs, targets = DATA[indices]
        optimizer.zero_grad()
        losses = cross_entropy(MODEL(inputs), targets, reduction="none")
        (torch.from_numpy(weights).float() * losses).mean().backward()
        sampler.observe(batch_gradient(MODEL))
        optimizer.step()
    return sampler


@pytest.mark.parametrize(
    ("method", "workers", "factor"),
    [("cd-grab", 0, 1024.0), ("id-grab", 0, 1024.0), ("cd-grab", 2, 1.0)],
)
def test_a_loss_shows_what_observe_is_told(method, workers, factor):
    sampler, criterion = trained(method=method)
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1 / factor)
    for _ in range(3):
        for inputs, targets in DataLoader(DATA, batch_sampler=sampler, num_workers=workers):
            optimizer.zero_grad()
            (criterion(MODEL(inputs), targets) * factor).backward()
            optimizer.step()
    learned = sampler.node_order.state_dict()
    for name, value in by_hand(method, 3).node_order.state_dict().items():
        np.testing.assert_allclose(learned[name], value, atol=1e-5)


def observed(sampler):
    """Return a list of all vectors that an order will observe."""
    seen = []
    observe = sampler.node_order.observe
    sampler.node_order.observe = lambda vectors: (seen.extend(vectors), observe(vectors))
    return seen


PLAIN = [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("kind", "told", "zero"),
    [
        ("accumulates", PLAIN, []),
        ("overflows", PLAIN, [2]),
        ("drops", [0, 1], []),  # a batch without a gradient ends what is learnt of its pass
        ("stops", PLAIN[:5], []),
    ],
)
def test_gradients_are_those_of_the_order(kind, told, zero):
    workers = 2 if kind == "stops" else 0
    vectors = []
    ends = []
    for how in ("plain", kind):
        sampler, criterion = trained(method="id-grab")
        seen = observed(sampler)
        loader = DataLoader(DATA, batch_sampler=sampler, num_workers=workers)
        for number, (inputs, targets) in enumerate(loader):
            loss = criterion(MODEL(inputs), targets)
            if how == "overflows" and number == 2:
                loss = loss * 1e38 * 1e38
            if how != "accumulates":
                MODEL.zero_grad()
            if not (how == "drops" and number == 2):
                (loss / (4 if how == "accumulates" else 1)).backward()
            if how == "stops" and number == 4:
                break
        sampler.settle()
        ends.append(sampler.node_order.position)
        vectors.append(np.array(seen))
    expected = vectors[0][told]
    expected[zero] = 0
    np.testing.assert_allclose(vectors[1], expected, rtol=1e-4, atol=1e-6)
    assert ends == [7, 5 if kind == "stops" else 7]
    for inputs, targets in loader:  # the next pass, or what is left of this one, is learnt again
        criterion(MODEL(inputs), targets).backward()
    assert len(seen) == len(told) + (2 if kind == "stops" else 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "best"}, "method must be one of cd-grab"),
        ({"unit": "pixel"}, "unit must be one of batch, example"),
        ({"num_units": 21}, r"num_units must lie in 1\.\.20"),
        ({"num_units": 5, "unit": "example"}, "num_units must .* unit='batch'"),
        *(({"num_units": given}, "num_units must be") for given in (0, 1.5, "7", [7], True)),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        OrderedSampler(20, 4, **options)


def test_bad_gradients_are_refused():
    sampler = OrderedSampler(10, 4, unit="example")
    for rows in (4, 4, 2):
        sampler.next_batch()
        for shape in ((rows + 1, 3), (rows,)):
            with pytest.raises(ValueError, match=rf"gradients must have shape \({rows}, dim\)"):
                sampler.observe(torch.zeros(shape))
        with pytest.raises(ValueError, match="gradients must be finite"):
            sampler.observe(torch.full((rows, 3), float("nan")))
        sampler.observe(torch.zeros(rows, 3))

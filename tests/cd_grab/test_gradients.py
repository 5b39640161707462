"""Gradients of units and their sketches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.cd_grab import sketch as slow_sketch
from torch import nn
from torch.nn.functional import cross_entropy

from flwr_hetero.cd_grab.gradients import (
    batch_gradient,
    example_gradients,
    random_signs,
    sketch_gradients,
)


def small_model(seed=0):
    torch.manual_seed(seed)
    body = [nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4), nn.LayerNorm(4)]
    return nn.Sequential(*body).to(memory_format=torch.channels_last)


def some_data(num_examples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_examples, 1, 4, 4, generator=generator)
    return inputs, torch.randint(4, (num_examples,), generator=generator)


def sketch(vectors, size, seed):
    return sketch_gradients(torch.from_numpy(np.atleast_2d(vectors)), size, seed)


def test_example_gradients_are_those_of_each_alone():
    model, (inputs, targets) = small_model(), some_data(5)
    model[3].bias.requires_grad_(False)
    each = example_gradients(model, cross_entropy, inputs, targets)
    for row, i in zip(each, range(5), strict=True):
        model.zero_grad()
        cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1]).backward()
        torch.testing.assert_close(row[None], batch_gradient(model))
    model.zero_grad()
    cross_entropy(model(inputs), targets).backward()
    torch.testing.assert_close(each.mean(dim=0, keepdim=True), batch_gradient(model))
    assert not each.requires_grad


@pytest.mark.parametrize("model", [small_model(), nn.Linear(16, 4, bias=False)], ids=str)
def test_batch_gradient_is_a_copy(model):
    """The published code kept a reference to the buffer that the next step wrote over."""
    inputs, targets = some_data(6)
    if isinstance(model, nn.Linear):
        inputs = inputs.flatten(1)
    cross_entropy(model(inputs[:3]), targets[:3]).backward()
    first = batch_gradient(model)
    before = first.clone()
    model.zero_grad(set_to_none=False)
    cross_entropy(model(inputs[3:]), targets[3:]).backward()
    assert torch.equal(first, before)
    assert not torch.equal(first, batch_gradient(model))


def test_parameters_without_gradient_count_as_zero():
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(3, 1)])
    model[1](torch.ones(1, 3)).sum().backward()
    assert batch_gradient(model).tolist() == [[0, 0, 0, 1, 1, 1, 1]]


def test_random_signs_never_change():
    """Nodes with different versions of this package and of NumPy must agree on them."""
    assert random_signs(16, seed=0).tolist() == [
        -1, 1, -1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, 1, -1,
    ]  # fmt: skip
    assert random_signs(100, seed=0)[:16].tolist() == random_signs(16, seed=0).tolist()
    assert random_signs(64, seed=1).tolist() != random_signs(64, seed=2).tolist()
    assert abs(random_signs(100_000, seed=5).mean()) < 4 / np.sqrt(100_000)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 9))
def test_sketch_is_the_sum_over_each_remainder(dim, size, seed):
    vectors = np.random.default_rng(seed).standard_normal((2, dim))
    expected = slow_sketch(vectors, size, random_signs(dim, seed))
    np.testing.assert_allclose(sketch(vectors, size, seed), expected, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sketch_keeps_dtype_and_whole_gradients(dtype):
    gradients = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    kind = np.float64 if dtype == torch.float64 else np.float32
    assert sketch_gradients(gradients, 7, seed=5).dtype == kind
    whole = sketch_gradients(gradients, 0, seed=5)
    assert np.array_equal(whole, gradients.to(torch.float64).numpy().astype(kind))


def test_sketch_is_linear():
    a, b = np.random.default_rng(0).standard_normal((2, 3, 50))
    np.testing.assert_allclose(sketch(a - b, 8, 1), sketch(a, 8, 1) - sketch(b, 8, 1), atol=1e-12)


def test_sketch_keeps_inner_products():
    rng, size = np.random.default_rng(0), 64
    a, b = rng.standard_normal((2, 1000))
    a, b = a / np.linalg.norm(a), 0.6 * a / np.linalg.norm(a) + 0.8 * b / np.linalg.norm(b)
    products = [np.prod(sketch([a, b], size, s), axis=0).sum() for s in range(400)]
    assert np.mean(products) == pytest.approx(a @ b, abs=4 * np.std(products) / 20)
    assert 0.5 < np.std(products) * np.sqrt(size) < 2.0
    short = np.prod(sketch([a[:30], b[:30]], size, 0), axis=0).sum()
    assert short == pytest.approx(a[:30] @ b[:30])

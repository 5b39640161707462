"""Gradients of units and their sketches."""

import numpy as np
import pytest
import torch
from oracles.cd_grab import sketch as slow_sketch
from torch import nn

from flwr_hetero.cd_grab.gradients import batch_gradient, random_signs, sketch_gradients


def test_batch_gradient_is_a_copy_with_zeros_for_missing_ones():
    """The published code kept a reference to the buffer that the next step wrote over."""
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(3, 1)])
    model[1](torch.ones(1, 3)).sum().backward()
    first = batch_gradient(model)
    model[1](torch.ones(1, 3)).sum().backward()
    assert first.tolist() == [[0, 0, 0, 1, 1, 1, 1]]
    assert batch_gradient(model).tolist() == [[0, 0, 0, 2, 2, 2, 2]]


def test_random_signs_never_change():
    """Nodes with different versions of this package and of NumPy must agree on them."""
    assert random_signs(16, seed=0).tolist() == [
        -1, 1, -1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, 1, -1,
    ]  # fmt: skip
    assert random_signs(100, seed=0)[:16].tolist() == random_signs(16, seed=0).tolist()
    assert random_signs(64, seed=1).tolist() != random_signs(64, seed=2).tolist()
    assert abs(random_signs(100_000, seed=5).double().mean()) < 4 / np.sqrt(100_000)


@pytest.mark.parametrize(("dim", "size"), [(1, 5), (7, 7), (40, 1), (40, 8), (41, 12), (13, 12)])
def test_sketch_is_the_sum_over_each_remainder(dim, size):
    vectors = np.random.default_rng(0).standard_normal((2, dim))
    expected = slow_sketch(vectors, size, random_signs(dim, seed=3).tolist())
    whole = sketch_gradients(torch.from_numpy(vectors), size, seed=3)
    np.testing.assert_allclose(whole, expected, atol=1e-5)

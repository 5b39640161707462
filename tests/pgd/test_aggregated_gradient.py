"""The aggregated gradient."""

import numpy as np
import torch
from oracles.pgd import renew_sum
from torch import nn

from flwr_hetero.pgd.aggregated_gradient import AggregatedGradient


def test_aggregate_follows_eq_9():
    weight = nn.Parameter(torch.zeros(3))
    gradient = AggregatedGradient({"w": weight}, num_samples=10)
    assert not gradient.is_known
    rng, total, covered = np.random.default_rng(0), np.zeros(3), np.zeros(())
    for size in (4, 2, 10, 3, 25):
        weight.grad = torch.from_numpy(rng.normal(size=3).astype(np.float32))
        gradient.absorb(size, {"w": weight.grad})
        size = min(size, 10)
        total = renew_sum(total, size * weight.grad.numpy(), size, 10)
        covered = renew_sum(covered, np.array(float(size)), size, 10)
        expected = total * 10 / covered
        np.testing.assert_allclose(gradient.direction["w"].numpy(), expected, rtol=1e-5)


def test_it_follows_parameters_to_their_device():
    """A trainer may move the model after the sampler was made."""
    model = nn.Linear(3, 2)
    gradient = AggregatedGradient(dict(model.named_parameters()), num_samples=10)
    gradient.parameters = dict(model.to("meta").named_parameters())
    gradient.absorb(4, {name: torch.ones_like(p) for name, p in model.named_parameters()})
    assert all(part.device.type == "meta" for part in gradient.total.values())

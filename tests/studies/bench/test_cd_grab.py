"""The benchmark's shortcut for many nodes' gradients is what each node would compute."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from flwr_hetero.cd_grab.gradients import batch_gradient
from flwr_hetero_studies.papers.cd_grab.nodes import UnitGradients, flat
from flwr_hetero_studies.tasks import make_model


@pytest.mark.parametrize(("name", "shape"), [("softmax", (1, 4, 4)), ("lenet", (1, 12, 12))])
@pytest.mark.parametrize("batch", [1, 3])
def test_gradients_of_all_nodes_are_each_nodes(name, shape, batch):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, batch, *shape, generator=generator)
    targets = torch.randint(10, (4, batch), generator=generator)
    alone, together = (make_model(name, shape, 10, seed=1) for _ in range(2))
    params = flat(alone)
    rows = UnitGradients(together)(params, inputs, targets)
    for row, unit, classes in zip(rows, inputs, targets, strict=True):
        alone.zero_grad()
        cross_entropy(alone(unit), classes).backward()
        torch.testing.assert_close(row[None], batch_gradient(alone), rtol=1e-4, atol=1e-6)

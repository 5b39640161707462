"""The paper's first step: gradient and priorities of a whole data set."""

import numpy as np
import pytest
import torch
from torch import nn

from flwr_hetero.pgd.priorities import all_priorities

LOSS = nn.CrossEntropyLoss(reduction="none")


def test_frozen_parameters_do_not_count():
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

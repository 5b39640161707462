"""PGD's priorities on a network of today's size and make, not only on toys."""

import torch
from torch import nn

from flwr_hetero.pgd.priorities import per_sample_priorities, sample_priorities
from flwr_hetero.task.models import make_model


def test_forward_mode_equals_a_gradient_per_example_on_resnet18() -> None:
    torch.manual_seed(0)
    model = make_model("resnet18", (3, 16, 16), 10).double().eval()
    assert sum(isinstance(module, nn.GroupNorm) for module in model.modules()) == 20
    inputs, targets = torch.randn(4, 3, 16, 16, dtype=torch.float64), torch.tensor([0, 3, 3, 9])
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    arguments = (model, nn.CrossEntropyLoss(reduction="none"), inputs, targets, direction)
    found = sample_priorities(*arguments, method="forward")
    expected = per_sample_priorities(*arguments, chunk_size=1)
    assert expected.abs().min() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from flwr_hetero.client.sampled_loss import importance, score_batches, scoring


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(),
        nn.Linear(4 * 36, 3),
    )  # fmt: skip


def data(count: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, 1, 8, 8), torch.randint(0, 3, (count,))


def test_upper_is_the_distance_of_the_softmax_from_the_label() -> None:
    torch.manual_seed(0)
    outputs, targets = 3 * torch.randn(50, 7), torch.randint(0, 7, (50,))
    by_hand = (outputs.softmax(1) - nn.functional.one_hot(targets, 7)).norm(dim=1)
    np.testing.assert_allclose(importance(outputs, targets), by_hand, rtol=1e-5)


def test_loss_is_the_loss_also_for_many_outputs_per_sample() -> None:
    outputs, targets = torch.randn(5, 2, 3), torch.randn(5, 2, 3)
    by_hand = ((outputs - targets) ** 2).sum(dim=(1, 2))
    np.testing.assert_allclose(
        importance(outputs, targets, "loss", partial(mse_loss, reduction="none")),
        by_hand,
        rtol=1e-5,
    )


def test_upper_is_the_gradient_norm_of_a_linear_model_on_unit_inputs() -> None:
    torch.manual_seed(0)
    model, targets = nn.Linear(6, 3, bias=False), torch.randint(0, 3, (10,))
    inputs = nn.functional.normalize(torch.randn(10, 6), dim=1)
    norms = []
    for one, target in zip(inputs, targets, strict=True):
        model.zero_grad()
        cross_entropy(model(one[None]), target[None]).backward()
        norms.append(model.weight.grad.norm().item())
    np.testing.assert_allclose(importance(model(inputs), targets), norms, rtol=1e-5)


def test_importance_leaves_the_training_graph_alone() -> None:
    model, (inputs, targets) = small_model(), data()
    torch.manual_seed(2)
    cross_entropy(model(inputs), targets).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(2)
    outputs = model(inputs)
    importance(outputs, targets)
    cross_entropy(outputs, targets).backward()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)
    plain = outputs.detach()
    importance(plain, targets)
    assert not plain.requires_grad


def test_scoring_touches_neither_statistics_nor_modes_nor_gradients() -> None:
    model, (inputs, targets) = small_model(), data()
    model[1].eval()  # a user's frozen BatchNorm stays frozen
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    score_batches(model, [(inputs, targets)])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())


def test_modes_come_back_after_an_error() -> None:
    model = small_model()
    with pytest.raises(RuntimeError), scoring(model):
        model(torch.zeros(1))
    assert model.training


def test_a_score_does_not_depend_on_the_batch_it_came_in() -> None:
    model, (inputs, targets) = small_model(), data()
    whole = score_batches(model, [(inputs, targets)])
    parts = score_batches(model, zip(inputs.split(3), targets.split(3), strict=True))
    np.testing.assert_allclose(whole, parts, rtol=1e-5)


def test_no_samples_no_scores() -> None:
    assert score_batches(small_model(), []).shape == (0,)


def test_refuses_an_unknown_kind() -> None:
    with pytest.raises(ValueError, match="kind must be one of"):
        importance(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), "norm")

"""PGD written out naively: one example at a time, one gradient per example."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

LAMBDA = 0.8


def learn_one(p_j: float, a_j: float, j: int, p_i: float, i: int) -> tuple[float, float, int]:
    """Algorithm 2 for one example, in logarithms as printed, with our rule for signs."""
    if i == j:
        return p_i, a_j, i
    if math.isnan(p_j) or p_i == 0 or p_j == 0 or (p_i > 0) != (p_j > 0):
        return p_i, 0.0, i
    newest = (math.log(abs(p_i)) - math.log(abs(p_j))) / (i - j)
    return p_i, LAMBDA * newest + (1 - LAMBDA) * a_j, i


def renew_sum(
    total: NDArray[np.float64], new_sum: NDArray[np.float64], num_new: int, num_samples: int
) -> NDArray[np.float64]:
    """Eq. 9: a share of the aggregated gradient, a sum over N examples, is replaced."""
    return (1 - num_new / num_samples) * total + new_sum


def one_by_one(
    model: nn.Module, loss_fn: nn.Module, inputs: Tensor, targets: Tensor, direction: dict
) -> Tensor:
    """Eq. 8 by a backward pass per example: the definition."""
    result = []
    for one, target in zip(inputs, targets, strict=True):
        model.zero_grad()
        loss_fn(model(one[None]), target[None]).sum().backward()
        result.append(sum((p.grad * direction[n]).sum() for n, p in model.named_parameters()))
    model.zero_grad()
    return torch.stack(result)

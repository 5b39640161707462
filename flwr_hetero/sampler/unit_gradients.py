"""Gradients of units of any torch model: of a batch, or of each example in it."""

from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from flwr_hetero.core.sketch import random_signs

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def batch_gradient(model: nn.Module) -> Tensor:
    """Copy the gradients that the last backward pass has left in a model.

    Parameters
    ----------
    model : nn.Module
        After ``backward``, before ``zero_grad``.

    Returns
    -------
    Tensor, shape (1, dim)
        All trainable parameters one after the other, zeros for those without a gradient. A
        copy: the next backward pass does not change it.

    Examples
    --------
    >>> model = nn.Linear(2, 1, bias=False)
    >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> batch_gradient(model).tolist()
    [[3.0, 4.0]]
    """
    parts = [
        (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1)
        for p in model.parameters()
        if p.requires_grad
    ]
    return torch.cat(parts)[None].detach()


def example_gradients(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the gradient of each example of a batch, at the same parameters.

    Parameters
    ----------
    model : nn.Module
        Without batch statistics and in-place state: examples must not depend on one another.
    loss : callable
        (outputs, targets) of a batch to its mean loss, such as ``cross_entropy``.
    inputs : Tensor, shape (batch, ...)
        The examples.
    targets : Tensor, shape (batch, ...)
        Theirs.

    Returns
    -------
    Tensor, shape (batch, dim)
        In the order of :func:`batch_gradient`.

    Examples
    --------
    >>> model = nn.Linear(1, 1, bias=False)
    >>> inputs, targets = torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1)
    >>> each = example_gradients(model, lambda out, target: (out - target).mean(), inputs, targets)
    >>> each.tolist()
    [[1.0], [2.0]]
    """
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss_of(params: dict[str, Tensor], example: Tensor, target: Tensor) -> Tensor:
        outputs = functional_call(model, params, (example[None],))
        return loss(outputs, target[None])

    each = vmap(grad(loss_of), in_dims=(None, 0, 0))(trained, inputs, targets)
    return torch.cat([each[name].reshape(len(inputs), -1) for name in trained], dim=1).detach()


def sketch_gradients(gradients: Tensor, size: int, seed: int) -> NDArray[np.floating]:
    """Sketch gradients where they are, and bring the sketches to the CPU.

    Parameters
    ----------
    gradients : Tensor, shape (num_units, dim)
        On any device.
    size : int
        Numbers per sketch; 0 keeps whole gradients.
    seed : int
        Seed of the signs.

    Returns
    -------
    ndarray of float32, or of float64 if the gradients are, shape (num_units, size)
        As :func:`~flwr_hetero.core.sketch.sketch` would give.

    Examples
    --------
    >>> sketch_gradients(torch.ones(2, 100), 8, seed=0).shape
    (2, 8)
    """
    dim = gradients.shape[1]
    if size:
        gradients = gradients * _signs_on(str(gradients.device), dim, seed)
    if 0 < size < dim:
        whole = dim - dim % size
        folded = gradients[:, :whole].reshape(len(gradients), -1, size).sum(dim=1)
        folded[:, : dim - whole] += gradients[:, whole:]
        gradients = folded
    kind = torch.float64 if gradients.dtype == torch.float64 else torch.float32
    return cast(NDArray[np.floating], gradients.to("cpu", kind).numpy())


@lru_cache(maxsize=4)
def _signs_on(device: str, dim: int, seed: int) -> Tensor:
    return torch.tensor(random_signs(dim, seed), device=device)

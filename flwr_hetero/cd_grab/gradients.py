r"""A short linear sketch of a long vector: random signs, then a fold.

.. math:: (S v)_c = \sum_{j \equiv c \bmod k} \sigma_j v_j, \qquad \sigma_j = \pm 1

It keeps inner products up to a noise of relative size :math:`1/\sqrt{k}`, and it is linear: the
sketch of a difference is the difference of the sketches.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from flwr_hetero.errors import invalid

Vectors = NDArray[np.floating]


@lru_cache(maxsize=4)
def random_signs(dim: int, seed: int) -> NDArray[np.int8]:
    """Draw a sign per coordinate, the same on every machine and NumPy version.

    Parameters
    ----------
    dim : int
        Number of coordinates.
    seed : int
        All nodes of a run share it.

    Returns
    -------
    ndarray of int8, shape (dim,)
        +1 or -1; read only, kept for the next call.

    Raises
    ------
    ValueError
        If ``dim`` or ``seed`` is negative.

    Examples
    --------
    >>> random_signs(8, seed=0).tolist() == random_signs(8, seed=0).tolist()
    True
    """
    if dim < 0 or seed < 0:
        raise invalid("dim, seed", (dim, seed), "be at least 0", "check the instruction")
    words = np.random.PCG64(seed).random_raw(-(-dim // 64)).astype("<u8")
    signs = 2 * np.unpackbits(words.view(np.uint8), count=dim).view(np.int8) - 1
    signs.setflags(write=False)
    return signs


def sketch(vectors: Vectors, size: int, seed: int) -> Vectors:
    """Sketch vectors to at most ``size`` coordinates.

    Parameters
    ----------
    vectors : ndarray of float, shape (..., dim)
        For instance gradients.
    size : int
        Coordinates k of the sketch. A vector that is not longer keeps its length, and its inner
        products are exact then.
    seed : int
        Seed of the signs.

    Returns
    -------
    ndarray of float, shape (..., min(size, dim))
        In the type of ``vectors``.

    Raises
    ------
    ValueError
        If ``size`` is not positive.

    Examples
    --------
    >>> v = np.arange(6.0)
    >>> s = sketch(v, 2, seed=3)
    >>> bool(np.allclose(sketch(5 * v, 2, seed=3), 5 * s)), s.shape
    (True, (2,))
    """
    return fold(vectors * random_signs(vectors.shape[-1], seed), size)


def fold(vectors: Vectors, size: int) -> Vectors:
    """Add up the coordinates with the same remainder modulo ``size``.

    Parameters
    ----------
    vectors : ndarray of float, shape (..., dim)
        Folding a sketch gives the shorter sketch of the same vector, if the sizes divide.
    size : int
        Coordinates that remain.

    Returns
    -------
    ndarray of float, shape (..., min(size, dim))
        The sums.

    Raises
    ------
    ValueError
        If ``size`` is not positive.

    Examples
    --------
    >>> fold(np.array([1.0, 2.0, 3.0, 4.0, 5.0]), 2)
    array([9., 6.])
    """
    if size < 1:
        raise invalid("size", size, "be at least 1", "1024 is usual")
    dim = vectors.shape[-1]
    if dim <= size:
        return vectors
    whole = dim - dim % size
    folded = vectors[..., :whole].reshape(*vectors.shape[:-1], -1, size).sum(axis=-2)
    folded[..., : dim - whole] += vectors[..., whole:]
    return np.asarray(folded)


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
        As :func:`~flwr_hetero.cd_grab.gradients.sketch` would give.

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

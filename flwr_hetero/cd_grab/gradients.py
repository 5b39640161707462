r"""Gradients of units on the node, and their sketch: random signs, then a fold.

.. math:: (S v)_c = \sum_{j \equiv c \bmod k} \sigma_j v_j, \qquad \sigma_j = \pm 1

A sketch keeps inner products up to a noise of relative size :math:`1/\sqrt{k}`, and is linear:
the sketch of a difference is the difference of the sketches.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


def batch_gradient(model: nn.Module) -> Tensor:
    """Copy the gradients that the last backward pass left in a model: (1, dim)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return flat_gradient((p.grad for p in trained), trained)


def flat_gradient(parts: Iterable[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
    """Put the gradients of parameters into one row, zeros for missing ones: (1, dim)."""
    pairs = zip(parts, parameters, strict=True)
    flat = [(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs]
    return torch.cat(flat)[None].detach()


def sketch_gradients(gradients: Tensor, size: int, seed: int) -> NDArray[np.float32]:
    """Sketch gradients (num, dim) on their device to at most ``size`` columns; 0: keep all."""
    dim = gradients.shape[1]
    if size:
        gradients = gradients * random_signs(dim, seed, str(gradients.device))
    if 0 < size < dim:
        # The last columns are too few to fold, so they are added to the first ones.
        num_full = dim - dim % size
        folded = gradients[:, :num_full].reshape(len(gradients), -1, size).sum(dim=1)
        folded[:, : dim - num_full] += gradients[:, num_full:]
        gradients = folded
    return cast(NDArray[np.float32], gradients.to("cpu", torch.float32).numpy())


@lru_cache(maxsize=4)
def random_signs(dim: int, seed: int, device: str = "cpu") -> Tensor:
    """Draw a sign per coordinate, the same on every machine and NumPy version."""
    # Draw raw words, because the methods of generators may change between NumPy versions.
    words = np.random.PCG64(seed).random_raw(-(-dim // 64)).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8), count=dim).view(np.int8)
    return torch.tensor(2 * bits - 1, device=device)

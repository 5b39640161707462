"""The gradient and the priorities of a whole data set, in two passes over it."""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_hetero.sampler.priorities import Loss, sample_priorities


def all_priorities(
    model: nn.Module,
    loss_fn: Loss,
    inputs: Tensor,
    targets: Tensor,
    *,
    names: Iterable[str] | None = None,
    batch_size: int = 512,
) -> tuple[NDArray[np.float64], dict[str, Tensor]]:
    """Compute every example's priority along the gradient of all of them (Eq. 7 and 8).

    Parameters
    ----------
    model : nn.Module
        Runs in evaluation mode and is left as it was, gradients included.
    loss_fn : callable
        ``loss_fn(outputs, targets)`` with one loss per example.
    inputs, targets : Tensor, shape (num_samples, ...)
        The whole data set.
    names : iterable of str, optional
        Parameters that count; all of them by default. Frozen ones have the gradient 0.
    batch_size : int
        Examples at a time; no influence on the result.

    Returns
    -------
    priorities : ndarray of float64, shape (num_samples,)
        Signed.
    gradient : dict of str to Tensor
        The sum of all gradients.

    Examples
    --------
    >>> model = nn.Linear(1, 1, bias=False)
    >>> losses = lambda outputs, targets: outputs[:, 0]  # the gradient is the input
    >>> all_priorities(model, losses, torch.tensor([[1.0], [3.0]]), torch.zeros(2))
    (array([ 4., 12.]), {'weight': tensor([[4.]])})
    """
    wanted = set(names) if names is not None else None
    counted = {n: p for n, p in model.named_parameters() if wanted is None or n in wanted}
    moving = {name: parameter for name, parameter in counted.items() if parameter.requires_grad}
    modes = [(module, module.training) for module in model.modules()]
    spans = [slice(start, start + batch_size) for start in range(0, len(inputs), batch_size)]
    model.eval()
    try:
        total = {name: torch.zeros_like(p) for name, p in counted.items()}
        for span in spans:
            loss = loss_fn(model(inputs[span]), targets[span]).sum()
            for name, part in zip(
                moving, torch.autograd.grad(loss, list(moving.values())), strict=True
            ):
                total[name] += part
        found = [
            sample_priorities(model, loss_fn, inputs[span], targets[span], total) for span in spans
        ]
    finally:
        for module, mode in modes:
            module.training = mode
    return torch.cat(found).double().cpu().numpy(), total

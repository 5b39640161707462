"""Scores of samples from a model's outputs, and the loss whose batches a sampler draws."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flwr_hetero.client.batch_sampler import BatchSampler, InTurn
from flwr_hetero.errors import invalid

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""``loss_fn(outputs, targets)`` with one loss per example (``reduction="none"``)."""

LOSS: Loss = partial(cross_entropy, reduction="none")


def gradient_norms(outputs: Tensor, targets: Tensor, loss_fn: Loss = LOSS) -> NDArray[np.float64]:
    """Score samples by the norm of their loss's gradient at the outputs."""
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_fn(leaf, targets).sum(), leaf)
    norms = gradient.reshape(len(leaf), -1).norm(dim=1)
    return np.asarray(norms.cpu(), dtype=np.float64)


@contextmanager
def scoring(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode for a scoring pass and give each module its own mode back.

    In train mode a scoring pass would move BatchNorm's running statistics, make the score of
    a sample depend on its neighbours, and draw dropout masks.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def score_batches(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]
) -> NDArray[np.float64]:
    """Return the cross-entropy of samples, from a forward pass that leaves the model as it was."""
    with scoring(model):
        losses = [LOSS(model(inputs), targets) for inputs, targets in batches]
    return torch.cat(losses).cpu().numpy().astype(np.float64)


class SampledLoss:
    r"""Replace ``CrossEntropyLoss()`` where a DataLoader's batches come from a sampler.

    .. math:: \frac{1}{b} \sum_i c_i \, l_i

    Each call takes the indices and weights :math:`c_i` of the batch that the DataLoader gave,
    returns the weighted mean of the losses, and passes the batch's scores to the sampler: the
    losses or, if the sampler ``learns_from`` importance, the norm of the loss's gradient at the
    outputs. Call it once per batch, in training only.

    Parameters
    ----------
    sampler : BatchSampler
        The DataLoader's ``batch_sampler``: one that learns from losses, as ``MercurySampler``
        and ``TopLossSampler`` do, or several of these ``InTurn``.
    loss_fn : callable
        ``loss_fn(outputs, targets)`` with one loss per example; cross-entropy if left out.

    Raises
    ------
    ValueError
        If the sampler is none of this package, or learns from priorities (``PGDSampler``).

    Examples
    --------
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> from flwr_hetero.sampler import MercurySampler
    >>> data = TensorDataset(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]))
    >>> loader = DataLoader(data, batch_sampler=MercurySampler(len(data), 2))
    >>> criterion = SampledLoss(loader.batch_sampler)
    >>> [round(criterion(inputs[:, :2], targets).item(), 4) for inputs, targets in loader]
    [0.6931, 0.6931]
    """

    def __init__(self, sampler: object, loss_fn: Loss = LOSS) -> None:
        if not isinstance(sampler, BatchSampler):
            raise invalid("sampler", sampler, "be a sampler of flwr_hetero.sampler")
        for each in sampler.samplers if isinstance(sampler, InTurn) else [sampler]:
            if each.learns_from == "priority":
                hint = "priorities come from gradients, use a PriorityFeed"
                raise invalid("sampler", type(each).__name__, "learn from losses", hint)
        self.sampler, self.loss_fn = sampler, loss_fn

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the weighted mean loss of a batch; the sampler learns from it."""
        indices, weights = self.sampler.take()
        losses = self.loss_fn(outputs, targets).reshape(len(indices), -1).sum(dim=1)
        drawn_by = self.sampler.current if isinstance(self.sampler, InTurn) else self.sampler
        if drawn_by.learns_from == "importance":
            scores = gradient_norms(outputs, targets, self.loss_fn)
        else:
            scores = losses.detach().double().cpu().numpy()
        self.sampler.update(indices, scores)
        self.sampler.watch(indices, losses)
        return (torch.from_numpy(weights).to(losses) * losses).mean()

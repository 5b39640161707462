"""How much a sample matters: importance from a model's outputs, and passes that only score."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flwr_hetero.client.batch_sampler import BatchSampler
from flwr_hetero.errors import invalid
from flwr_hetero.pgd.sampler import PGDSampler

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""``loss_fn(outputs, targets)`` with one loss per example (``reduction="none"``)."""


LOSS: Loss = partial(cross_entropy, reduction="none")


KINDS = ("upper", "loss")


def importance(
    outputs: Tensor, targets: Tensor, kind: str = "upper", loss_fn: Loss = LOSS
) -> NDArray[np.float64]:
    r"""Score samples by the outputs that a forward pass gave them."""
    if kind not in KINDS:
        raise invalid("kind", kind, f"be one of {KINDS}", "upper varies less")
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_(kind == "upper")
        losses = loss_fn(leaf, targets).reshape(len(leaf), -1).sum(dim=1)
        if kind == "upper":
            (gradient,) = torch.autograd.grad(losses.sum(), leaf)
            losses = gradient.reshape(len(leaf), -1).norm(dim=1)
    return losses.detach().cpu().numpy().astype(np.float64)


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
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    kind: str = "upper",
    loss_fn: Loss = LOSS,
) -> NDArray[np.float64]:
    """Score samples with a forward pass that leaves the model as it was."""
    with scoring(model):
        scores = [importance(model(inputs), targets, kind, loss_fn) for inputs, targets in batches]
    return np.concatenate(scores) if scores else np.empty(0)


class SampledLoss:
    r"""Stand in for ``CrossEntropyLoss()`` where a DataLoader's batches come from a sampler.

    .. math:: \frac{1}{b} \sum_i c_i \, l_i

    Each call takes the indices and weights :math:`c_i` of the batch that the DataLoader gave,
    returns the weighted mean of the losses, and hands the batch's scores to the sampler.

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
        If the sampler is none of this package's, or a ``PGDSampler``: it learns from priorities.

    Notes
    -----
    A sampler that wants importance (``MercurySampler`` unless it is told ``scores="loss"``) gets
    the norm of the loss's gradient at the outputs, see
    :func:`~flwr_hetero.client.sampled_loss.importance`; any other gets the losses. Call it once for
    each batch, in training only.

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
            rule = "be a sampler of flwr_hetero.sampler"
            raise invalid("sampler", sampler, rule, "pass the DataLoader's batch_sampler")
        for each in getattr(sampler, "samplers", [sampler]):
            if isinstance(each, PGDSampler):
                cure = "use a PriorityFeed, which takes priorities from the gradients"
                raise invalid("sampler", type(each).__name__, "learn from losses", cure)
        self.sampler, self.loss_fn = sampler, loss_fn

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the weighted mean loss of a batch; the sampler learns from it."""
        indices, weights = self.sampler.take()
        losses = self.loss_fn(outputs, targets).reshape(len(indices), -1).sum(dim=1)
        drawn_by = getattr(self.sampler, "current", self.sampler)
        if getattr(drawn_by, "scores", "loss") == "importance":
            scores = importance(outputs, targets, loss_fn=self.loss_fn)
        else:
            scores = losses.detach().double().cpu().numpy()
        self.sampler.update(indices, scores)
        return (torch.from_numpy(weights).to(losses) * losses).mean()

"""The loss of batches that a sampler draws, and the scores of examples for the sampler."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.functional import cross_entropy
from torch.utils.hooks import RemovableHandle

from flwr_hetero.client.batch_sampler import BatchSampler
from flwr_hetero.errors import invalid

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""``loss_fn(outputs, targets)`` with one loss per example (``reduction="none"``)."""

LOSS: Loss = partial(cross_entropy, reduction="none")
ROUNDING = 0.01  # relative error of a factor of 1 in half precision


def gradient_norms(
    outputs: Tensor, targets: Tensor, loss_fn: Loss = LOSS, num_examples: int | None = None
) -> NDArray[np.float64]:
    """Score samples by the norm of their loss's gradient at the outputs."""
    count = len(outputs) if num_examples is None else num_examples
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        losses = example_losses(loss_fn, leaf, targets, count)
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    norms = at_least_single(gradient).reshape(count, -1).norm(dim=1)
    return np.asarray(norms.cpu(), dtype=np.float64)


def example_losses(loss_fn: Loss, outputs: Tensor, targets: Tensor, count: int) -> Tensor:
    """Average element-wise losses over each example's elements whose target is not ignored."""
    losses = loss_fn(outputs, targets)
    if losses.ndim == 0 or losses.numel() % count:
        rule = f"give a loss for each of {count} examples, not of shape {tuple(losses.shape)}"
        raise ValueError(f'loss_fn must {rule}: make it with reduction="none".')
    losses = at_least_single(losses)
    if losses.shape == (count,):
        return losses
    counted = torch.ones_like(losses)
    if losses.numel() == targets.numel() and not targets.is_floating_point():
        # -100 is torch's own default.
        ignored = int(_setting(loss_fn, "ignore_index", -100))
        counted = (targets != ignored).reshape(losses.shape).to(losses)
    total = losses.reshape(count, -1).sum(dim=1)
    return total / counted.reshape(count, -1).sum(dim=1).clamp(min=1)


def _setting(loss_fn: Loss, name: str, default: Any) -> Any:
    """Return a setting of a loss: of a module, or of a function whose settings are bound."""
    keywords = loss_fn.keywords if isinstance(loss_fn, partial) else {}
    return keywords.get(name, getattr(loss_fn, name, default))


def at_least_single(values: Tensor) -> Tensor:
    """Return half-precision values in single precision, others as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


@contextmanager
def scoring(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode for a scoring pass and give each module its own mode back."""
    # In train mode a scoring pass would move BatchNorm's running statistics, make the score of a
    # sample depend on the others of its batch, and draw dropout masks.
    modes = {module: module.training for module in model.modules()}
    model.eval()
    # cuDNN has no backward pass for an RNN in eval mode.
    for module in modes:
        module.training = isinstance(module, nn.RNNBase) and not module.dropout
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def score_batches(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], loss_fn: Loss = LOSS
) -> NDArray[np.float64]:
    """Return the losses of samples, from a forward pass that leaves the model as it was."""
    with scoring(model):
        losses = [loss_fn(model(inputs), targets) for inputs, targets in batches]
    return torch.cat(losses).cpu().numpy().astype(np.float64)


def on_backward(
    losses: Tensor,
    weights: NDArray[np.float64],
    parameters: Sequence[Tensor],
    learn: Callable[[Sequence[Tensor | None] | None, float], None],
) -> RemovableHandle:
    """Call ``learn`` with the gradients of the mean of ``weights * losses`` after backward."""
    factors: list[Tensor] = []

    def end(gradients: Sequence[Tensor | None]) -> None:
        handle.remove()
        gradients = [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]
        # The gradients of the losses themselves show the factor that gradient accumulation or a
        # GradScaler multiplies them by. The gradients passed on are divided by it. They are None
        # if they overflow because of it.
        scale = float(factors[0].cpu().double().sum()) * len(weights) / float(weights.sum())
        finite = all(g is None or bool(g.isfinite().all()) for g in gradients)
        if scale > 1.0 + ROUNDING and not finite:
            learn(None, scale)
            return
        scale = 1.0 if abs(scale - 1.0) < ROUNDING else scale
        learn([None if g is None else at_least_single(g) / scale for g in gradients], scale)

    losses.register_hook(factors.append)  # type: ignore[no-untyped-call]
    handle = register_multi_grad_hook(parameters, end)
    return handle


class WeightedLoss(nn.Module):
    r"""Replace ``CrossEntropyLoss()`` where a DataLoader's batches come from a sampler.

    .. math:: \frac{1}{b} \sum_i c_i \, l_i

    Each call takes the weights :math:`c_i` of the batch that the DataLoader gave, and passes the
    batch's scores to the sampler: the losses or, if it ``learns_from`` importance, the norm of the
    loss's gradient at the outputs. Call it once per batch, in training only, else RuntimeError.

    Parameters
    ----------
    sampler : BatchSampler
        The DataLoader's ``batch_sampler``; not a ``PGDSampler``, else ValueError.
    loss_fn : callable
        ``loss_fn(outputs, targets)`` made with ``reduction="none"``, else ValueError. An example's
        elements are averaged, without those whose target is the ``ignore_index``.

    Examples
    --------
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> from flwr_hetero.sampler import MercurySampler
    >>> data = TensorDataset(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]))
    >>> loader = DataLoader(data, batch_sampler=MercurySampler(len(data), 2))
    >>> criterion = WeightedLoss(loader.batch_sampler)
    >>> [round(criterion(inputs[:, :2], targets).item(), 4) for inputs, targets in loader]
    [0.6931, 0.6931]
    """

    def __init__(self, sampler: object, loss_fn: Loss = LOSS) -> None:
        if not isinstance(sampler, BatchSampler):
            raise invalid("sampler", sampler, "be a sampler of flwr_hetero.sampler")
        if sampler.learns_from == "priority":
            hint = "priorities come from gradients, use a PriorityFeed"
            raise invalid("sampler", type(sampler).__name__, "learn from losses", hint)
        reduction = _setting(loss_fn, "reduction", "none")
        if reduction != "none":
            raise invalid("loss_fn", reduction, 'be made with reduction="none"')
        # A module, because some models hold their loss as one.
        super().__init__()
        self.sampler = sampler
        self.loss_fn = loss_fn

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the weighted mean loss of a batch; the sampler learns from it."""
        if not torch.is_grad_enabled():
            raise RuntimeError("use WeightedLoss in training only: evaluate with loss_fn")
        indices, weights = self.sampler.take()
        count = len(indices)
        losses = example_losses(self.loss_fn, outputs, targets, count)
        if self.sampler.learns_from == "importance":
            scores = gradient_norms(outputs, targets, self.loss_fn, count)
        else:
            scores = losses.detach().cpu().double().numpy()
        self.sampler.update(indices, scores)
        self.sampler.watch(indices, losses)
        return (torch.from_numpy(weights).to(losses) * losses).mean()


def criterion_for(sampler: object, loss_fn: Any = None) -> Loss:
    """Make the loss for the batches of a sampler; the mean loss if it is none of this package."""
    is_ours = isinstance(sampler, BatchSampler)
    changed = copy(loss_fn or nn.CrossEntropyLoss())
    reduction = "none" if is_ours else "mean"
    if isinstance(changed, partial) and "reduction" in changed.keywords:
        changed = partial(changed, reduction=reduction)
    elif hasattr(changed, "reduction"):
        changed.reduction = reduction
    return WeightedLoss(sampler, changed) if is_ours else changed

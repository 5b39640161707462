"""A loss function that weights what a sampler drew, and tells the sampler how it went."""

import torch
from torch import Tensor

from flwr_hetero.core.errors import invalid
from flwr_hetero.sampler.batches import BatchSampler
from flwr_hetero.sampler.pgd import PGDSampler
from flwr_hetero.sampler.scores import LOSS, Loss, importance


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
    :func:`~flwr_hetero.sampler.scores.importance`; any other gets the losses. Call it once for
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
        """Return the weighted mean loss of a batch; the sampler learns from it.

        Parameters
        ----------
        outputs : Tensor, shape (batch, ...)
            What the model returned.
        targets : Tensor, shape (batch, ...)
            Labels.

        Returns
        -------
        Tensor, shape ()
            To call ``backward`` on.
        """
        indices, weights = self.sampler.take()
        losses = self.loss_fn(outputs, targets).reshape(len(indices), -1).sum(dim=1)
        drawn_by = getattr(self.sampler, "current", self.sampler)
        if getattr(drawn_by, "scores", "loss") == "importance":
            scores = importance(outputs, targets, loss_fn=self.loss_fn)
        else:
            scores = losses.detach().double().cpu().numpy()
        self.sampler.update(indices, scores)
        return (torch.from_numpy(weights).to(losses) * losses).mean()

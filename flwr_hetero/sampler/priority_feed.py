"""A PGDSampler together with what feeds it: the aggregated gradient and the priorities."""

from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_hetero.core.errors import invalid
from flwr_hetero.sampler.aggregated import AggregatedGradient
from flwr_hetero.sampler.batches import BatchSampler, StateDict
from flwr_hetero.sampler.full_pass import all_priorities
from flwr_hetero.sampler.layer_priorities import LayerPriorities
from flwr_hetero.sampler.pgd import PGDSampler
from flwr_hetero.sampler.priorities import Loss


class PriorityFeed(BatchSampler):
    """Draw PGD's batches and learn from the gradients that training computes anyway.

    Stands where a sampler stands; :meth:`on_batch` is called between ``backward`` and the
    optimizer's step. One iteration of Algorithm 1 is then

    .. code-block:: python

        indices, weights = feed.next_batch()
        losses = loss_fn(model(inputs[indices]), targets[indices])
        (losses * torch.from_numpy(weights)).mean().backward()
        feed.on_batch(model, indices, losses)
        optimizer.step()

    Parameters
    ----------
    sampler : PGDSampler
        Draws the batches; aggressive.
    model : nn.Module
        The model trained. Listened to until :meth:`close` or the end of a ``with`` block.
    layers : {"last", "all"}
        Which parameters the priorities count: the last layer's cost little and rank almost
        alike; all cost about one more forward pass.
    stride, idle_stride : int
        Of so many batches one is measured while the sampler's gate is open and while it is
        closed; then the batch before gives its gradient, too. The rules of the paper measure
        every batch.

    Raises
    ------
    ValueError
        If the sampler is not aggressive: the examples taken in turn then have weight 0 and
        nothing of theirs flows back. Or if the model does not suit, see
        :class:`~flwr_hetero.sampler.layer_priorities.LayerPriorities`.

    Examples
    --------
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> model, inputs, targets = nn.Linear(3, 2), torch.randn(8, 3), torch.arange(8) % 2
    >>> loss_fn = nn.CrossEntropyLoss(reduction="none")
    >>> with PriorityFeed(PGDSampler(8, 4, rule="topk"), model) as feed:
    ...     for _ in range(5):
    ...         indices, weights = feed.next_batch()
    ...         losses = loss_fn(model(inputs[indices]), targets[indices])
    ...         (losses * torch.from_numpy(weights)).mean().backward()
    ...         _ = feed.on_batch(model, indices, losses)
    >>> feed.summary()["coverage"]
    1.0
    """

    def __init__(
        self,
        sampler: PGDSampler,
        model: nn.Module,
        *,
        layers: str = "last",
        stride: int = 4,
        idle_stride: int = 64,
    ) -> None:
        super().__init__(sampler.num_samples, sampler.batch_size)
        for name, value in (("stride", stride), ("idle_stride", idle_stride)):
            if value < 1:
                raise invalid(name, value, "be at least 1", "1 measures every batch")
        if not sampler.aggressive:
            cure = "call sample_priorities for the basic variant"
            raise invalid("sampler.aggressive", False, "be True", cure)
        self.sampler, self.layers = sampler, layers
        self.listener = LayerPriorities(model, layers)
        self.gradient = AggregatedGradient(self.listener.parameters, sampler.num_samples)
        self.stride, self.idle_stride, self._batches = stride, idle_stride, 0
        self._weights, self._measures, self._follows = np.ones(0), False, False

    @property
    def _stride(self) -> int:
        if self.sampler.rule != "stochastic":
            return 1
        return self.stride if self.sampler.is_open else self.idle_stride

    def next_batch(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Draw the next batch and, in its turn, point the listener along the present gradient."""
        indices, self._weights = self.sampler.next_batch()
        phase, last = self._batches % self._stride, self._stride - 1
        self._measures = phase == 0
        self._follows = self._measures or (phase == last and not self.sampler.is_open)
        self._batches += 1
        if self._measures and self.gradient.is_known:
            self.gradient.to_device()
            self.listener.direction = self.gradient.total
        return indices, self._weights

    def on_batch(self, model: nn.Module, indices: NDArray[np.int64], losses: Tensor) -> int:
        """Hand the batch's priorities to the sampler and its gradient to the aggregate.

        Parameters
        ----------
        model : nn.Module
            With the gradient of ``(weights * losses).mean()`` in its parameters.
        indices : ndarray of int64, shape (batch,)
            From :meth:`next_batch`.
        losses : Tensor, shape (batch,)
            Not used: priorities come from the gradients.

        Returns
        -------
        int
            Examples that went through a forward pass besides: the batch if the priorities of
            all layers were measured, else none.

        Notes
        -----
        Priorities count along the gradient before this batch (Algorithm 1, line 20). The very
        first batch has none to follow and only starts the aggregate. With weights other than 1
        the aggregate takes the weighted sum, which is the unbiased one. A batch stands for
        those passed over since the one before, so that the aggregate remembers an epoch.
        """
        if not self._follows:
            return 0
        measured = self.listener.collect()
        self.listener.direction = {}  # the next batch may be another sampler's
        if measured is not None:
            factors = self._weights / (self.gradient.scale * len(indices))
            priorities, norms = torch.stack(measured).cpu().numpy() / factors
            self.sampler.update(indices, priorities, norms)
        self.gradient.absorb(len(indices) * self._stride)
        return len(indices) if measured is not None and self.layers == "all" else 0

    def full_pass(
        self,
        model: nn.Module,
        loss_fn: Loss,
        inputs: Tensor,
        targets: Tensor,
        *,
        batch_size: int = 512,
    ) -> None:
        """Compute the gradient and then the priority of all examples: the paper's first step.

        Costs about two epochs; without it the first epoch is taken in turn instead.

        Parameters
        ----------
        model : nn.Module
            Runs in evaluation mode and is left as it was, gradients included.
        loss_fn : callable
            ``loss_fn(outputs, targets)`` with one loss per example.
        inputs, targets : Tensor, shape (num_samples, ...)
            The whole local data set.
        batch_size : int
            Examples at a time; no influence on the result.
        """
        self.listener.direction = {}
        priorities, total = all_priorities(
            model, loss_fn, inputs, targets, names=self.gradient.parameters, batch_size=batch_size
        )
        self.gradient.total, self.gradient.covered = total, float(self.num_samples)
        self.sampler.update(np.arange(self.num_samples), priorities)

    def update(self, indices: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """Do nothing: what a training loop hands over are losses, not priorities."""

    def summary(self) -> dict[str, float]:
        """Describe the sampling in a few figures, as the sampler does."""
        return self.sampler.summary()

    def state_dict(self) -> StateDict:
        """Return the state of the sampler and the aggregated gradient."""
        batches: StateDict = {"batches": self._batches}
        return self.sampler.state_dict() | self.gradient.state_dict() | batches

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        if not isinstance(state.get("batches"), int):
            raise ValueError("state counts no batches: start afresh.")
        before = self.gradient.state_dict()
        self.gradient.load_state_dict(state)
        try:
            self.sampler.load_state_dict(state)
        except ValueError:
            self.gradient.load_state_dict(before)
            raise
        self._batches = int(state["batches"])

    def close(self) -> None:
        """Stop listening to the model."""
        self.listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

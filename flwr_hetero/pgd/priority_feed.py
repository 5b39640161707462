"""PGD's sampler fed by the training step itself: the aggregated gradient and the priorities."""

from collections import deque
from collections.abc import Sequence
from typing import Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flwr_hetero.client.batch_sampler import Batch, BatchSampler
from flwr_hetero.client.device import reading_cost
from flwr_hetero.client.weighted_loss import Loss, on_backward
from flwr_hetero.errors import invalid
from flwr_hetero.pgd.aggregated_gradient import AggregatedGradient, Gradients
from flwr_hetero.pgd.layer_priorities import LayerPriorities
from flwr_hetero.pgd.priorities import all_priorities
from flwr_hetero.pgd.sampler import PGDSampler
from flwr_hetero.state_dict import StateDict, check_state

EVERY_OPEN, EVERY_CLOSED = 4, 64
"""Of so many batches of the rule ``stochastic`` one is measured, by the state of the gate."""
MOST_AHEAD = 4096
"""Batches drawn and not trained that are remembered."""


class PriorityFeed(BatchSampler):
    """Draw PGD's batches and learn from the gradients that training computes anyway.

    Used in place of the sampler. As a DataLoader's ``batch_sampler`` it learns from the loss:
    ``WeightedLoss(feed)``. In a loop that draws by :meth:`next_batch`, :meth:`on_batch` is called
    between ``backward`` and the optimizer's step. Either is one iteration of Algorithm 1 per
    batch *trained*; batches may be drawn ahead.

    Parameters
    ----------
    sampler : PGDSampler
        Draws the batches.
    model : nn.Module
        The model trained. Has hooks until :meth:`close` or the end of a ``with`` block.
    layers : {"last", "all"}
        Which parameters the priorities count: the last layer's cost little and rank almost
        alike; all cost about one more forward pass.

    Raises
    ------
    ValueError
        If the model has no parameters, or a layer is not linear in its parameters.

    Notes
    -----
    Priorities count along the gradient before this batch (Alg. 1, l. 20); the very first batch
    has none to follow. ``topk`` measures every batch. ``stochastic`` measures one in 4 while its
    gate is open and one in 64 while it is closed; each stands for those since the one before, so
    that the aggregate remembers an epoch.

    The model's outputs have the examples in their first dimension. The layers' priorities are
    compared with forward mode once; if they differ, forward mode takes over, with a warning.

    References
    ----------
    Zhou and Gao, "Distributed Framework for Accelerating Training of Deep Learning Models through
    Prioritization", section III-B.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> from flwr_hetero.sampler import WeightedLoss
    >>> _ = torch.manual_seed(0)
    >>> data = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    >>> model = nn.Linear(3, 2)
    >>> feed = PriorityFeed(PGDSampler(len(data), 4, rule="topk"), model)
    >>> criterion = WeightedLoss(feed)
    >>> for epoch in range(3):
    ...     for inputs, targets in DataLoader(data, batch_sampler=feed, num_workers=0):
    ...         criterion(model(inputs), targets).backward()
    >>> feed.summary()["coverage"]
    1.0
    """

    learns = True

    def __init__(self, sampler: PGDSampler, model: nn.Module, *, layers: str = "last") -> None:
        super().__init__(sampler.num_samples, sampler.batch_size)
        self.sampler, self.layers = sampler, layers
        self.listener = LayerPriorities(model, layers)
        self.gradient = AggregatedGradient(self.listener.parameters, sampler.num_samples)
        self._trained = 0
        self._ahead: deque[Batch] = deque(maxlen=MOST_AHEAD)
        self._watch: RemovableHandle | None = None

    @property
    def measure_every(self) -> int:
        """Of so many batches one is measured."""
        if self.sampler.rule == "topk":
            return 1
        return EVERY_OPEN if self.sampler.is_open else EVERY_CLOSED

    @property
    def _absorbs(self) -> bool:
        """Whether the gradient of the batch to be trained next is added to the aggregate."""
        every = self.measure_every
        # with the gate closed the batch before gives its gradient too: a fresh direction
        before = not self.sampler.is_open and (self._trained + 1) % every == 0
        return before or self._trained % every == 0

    def next_batch(self) -> Batch:
        """Draw the next batch."""
        self._ahead.append(self.sampler.next_batch())
        self._aim()
        return self._ahead[-1]

    def take(self) -> Batch:
        """Collect the oldest batch that iteration yielded; nothing is learnt from that alone."""
        noted = self._is_helped, self.unhelped_passes
        batch = super().take()
        self._is_helped, self.unhelped_passes = noted
        return batch

    def _aim(self) -> None:
        """Point along the present gradient if the batch to be trained next is to be measured."""
        measured = self._trained % self.measure_every == 0
        self.listener.direction = {}
        if measured and self._ahead and self.gradient.is_known:
            self.gradient.to_device()
            self.listener.direction = self.gradient.total

    def watch(self, indices: NDArray[np.int64], losses: Tensor) -> None:
        """Learn from the backward pass of these losses, when it has been run.

        The losses' own gradients are the factors with which they count in it, whatever scales
        them: weights, gradient accumulation or a ``GradScaler``.
        """
        if self._watch is not None:
            self._watch.remove()  # of a loss without a backward pass
        if not losses.requires_grad:
            return
        weights = self._find(indices)
        parameters = {n: p for n, p in self.gradient.parameters.items() if p.requires_grad}

        def end(gradients: Sequence[Tensor | None] | None, scale: float) -> None:
            if gradients is not None:  # else a GradScaler skips this step
                found = dict.fromkeys(self.gradient.parameters)
                found |= dict(zip(parameters, gradients, strict=True))
                self._learn(indices, weights, scale, found)

        if (self._absorbs or self.listener.direction) and parameters:
            self._watch = on_backward(losses, weights, list(parameters.values()), end)
        else:
            losses.register_hook(lambda _: self._count())  # type: ignore[no-untyped-call]

    def on_batch(self, model: nn.Module, indices: NDArray[np.int64], losses: Tensor) -> int:
        """Pass the batch's priorities to the sampler and add its gradient to the aggregate.

        ``model`` holds the gradient of ``(weights * losses).mean()``; ``losses`` are not used.
        Returns how many forward passes of an example that cost: the batch's if priorities were
        measured in one, less if by the last layer alone.
        """
        gradients = {name: p.grad for name, p in self.gradient.parameters.items()}
        measured = self._learn(indices, self._find(indices), 1.0, gradients)
        if not measured:
            return 0
        passes = self.layers == "all" or self.listener.by_forward_mode
        return len(indices) if passes else reading_cost(len(indices))

    def _find(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the weights of a batch that was drawn; those before it will not be trained."""
        for _ in range(len(self._ahead)):
            drawn, weights = self._ahead.popleft()
            if np.array_equal(drawn, indices):
                self.note_help()
                return weights
        raise invalid("indices", list(indices), "be of a batch drawn and not yet trained")

    def _learn(
        self,
        indices: NDArray[np.int64],
        weights: NDArray[np.float64],
        scale: float,
        gradients: Gradients,
    ) -> bool:
        """Do Algorithm 1's lines 9 to 11 and 22; return whether priorities were measured.

        gradients: of the mean of weights * losses; the losses counted ``scale`` times as much.
        """
        absorbs = self._absorbs
        measured = self.listener.collect(len(indices))
        self.listener.direction = {}  # the next batch may be another sampler's
        if measured is not None:
            # the loss of example i had the factor scale * weight_i / batch, the direction 1 / scale
            factors = weights * scale / (self.gradient.scale * len(indices))
            priorities, norms = torch.stack(measured).cpu().numpy() / factors
            self.sampler.update(indices, priorities, norms, weights)
        if absorbs:
            self.gradient.absorb(len(indices) * self.measure_every, gradients)
        self._count()
        return measured is not None

    def _count(self) -> None:
        self._trained += 1
        self._aim()
        self.batch_done()

    def full_pass(
        self,
        model: nn.Module,
        loss_fn: Loss,
        inputs: Tensor,
        targets: Tensor,
        *,
        batch_size: int = 512,
    ) -> None:
        """Compute the gradient and the priority of all examples: the paper's first step.

        Costs about two epochs, in evaluation mode, ``batch_size`` examples at a time; the model
        is left as it was. Without it the first epoch is taken in turn instead.
        """
        self.listener.direction = {}
        priorities, total = all_priorities(
            model, loss_fn, inputs, targets, names=self.gradient.parameters, batch_size=batch_size
        )
        self.gradient.total, self.gradient.covered = total, float(self.num_samples)
        self.sampler.update(np.arange(self.num_samples), priorities)

    def update(self, indices: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """Do nothing: a training loop passes losses, not priorities."""

    def summary(self) -> dict[str, float]:
        """Describe the sampler's state for the history."""
        return self.sampler.summary()

    def state_dict(self) -> StateDict:
        """Return the state of the sampler, the aggregated gradient, and what the check found."""
        own: StateDict = {
            "batches": self._trained,
            "is_checked": self.listener.is_checked,
            "by_forward_mode": self.listener.by_forward_mode,
        }
        return self.sampler.state_dict() | self.gradient.state_dict() | own

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        schema = {"batches": int, "is_checked": bool, "by_forward_mode": bool}
        check_state(state, schema, "PriorityFeed")
        before = self.gradient.state_dict()
        self.gradient.load_state_dict(state)
        try:
            self.sampler.load_state_dict(state)
        except ValueError:
            self.gradient.load_state_dict(before)
            raise
        self._trained = cast(int, state["batches"])
        self.listener.is_checked = bool(state["is_checked"])
        self.listener.by_forward_mode = bool(state["by_forward_mode"])

    def close(self) -> None:
        """Take the hooks off the model."""
        self.listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


PGDSampler.feed = PriorityFeed

"""PGD's sampler fed by the training step itself: the aggregated gradient and the priorities."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flwr_hetero.client.batch_sampler import Batch, BatchSampler, Floats, Indices
from flwr_hetero.client.device import reading_cost
from flwr_hetero.client.weighted_loss import Loss, at_least_single, on_backward
from flwr_hetero.errors import invalid
from flwr_hetero.pgd.priorities import LayerPriorities, all_priorities
from flwr_hetero.pgd.sampler import PGDSampler
from flwr_hetero.state_dict import StateDict, check_state

Gradients = Mapping[str, Tensor | None]
EVERY = {"topk": 1, "stochastic": 4}  # of so many batches of a rule one is measured


class AggregatedGradient:
    """Keep the sum of all N examples' gradients, along which priorities count (Eq. 9)."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], num_samples: int) -> None:
        self.parameters, self.num_samples = dict(parameters), num_samples
        self.total = {n: at_least_single(torch.zeros_like(p)) for n, p in parameters.items()}
        # examples that the total covers; it follows Eq. 9 too, as Adam corrects its moments
        self.covered = 0.0

    @property
    def scale(self) -> float:
        """Factor from ``total`` to a sum over all N examples; 1 after some epochs."""
        return self.num_samples / self.covered if self.covered else 1.0

    @property
    def direction(self) -> dict[str, Tensor]:
        """The sum over N examples; zeros while nothing is known."""
        return {name: part * self.scale for name, part in self.total.items()}

    def to_device(self) -> None:
        """Move the sum to where the parameters are."""
        for name, parameter in self.parameters.items():
            self.total[name] = self.total[name].to(parameter.device)

    def absorb(self, num_new: int, gradients: Gradients) -> None:
        """Add the mean gradient of a batch (Alg. 1, l. 22)."""
        self.to_device()
        # Eq. 9: gbar <- (1 - n / N) gbar + n g
        num_new = min(num_new, self.num_samples)
        keep = 1 - num_new / self.num_samples
        for name, total in self.total.items():
            total.mul_(keep)
            if (new := gradients[name]) is not None:
                total.add_(new, alpha=num_new)
        self.covered = keep * self.covered + num_new


class PriorityFeed(BatchSampler):
    """Draw PGD's batches and learn from the gradients that training computes anyway.

    As a DataLoader's ``batch_sampler`` it learns from the loss: ``WeightedLoss(feed)``. Who draws
    by :meth:`next_batch` calls :meth:`on_batch` between ``backward`` and the optimizer's step.

    Priorities count along the gradient before this batch (Alg. 1, l. 20). ``topk`` measures every
    batch; ``stochastic`` one in 4, which stands for those since the one before. ValueError if a
    layer is not linear in its parameters, or, with the first batch measured, they are used outside
    it, or examples are not in its first dimension: :func:`~flwr_hetero.sampler.sample_priorities`.

    Parameters
    ----------
    sampler : PGDSampler
        Draws the batches.
    model : nn.Module
        The model trained. Has hooks until :meth:`close` or the end of a ``with`` block.
    layers : {"last", "all"}
        Which parameters the priorities count: the last layer's cost little and rank almost
        alike; all cost about one more forward pass.

    Examples
    --------
    >>> from flwr_hetero.sampler import WeightedLoss
    >>> model, inputs, targets = nn.Linear(3, 2), torch.ones(8, 3), torch.arange(8) % 2
    >>> feed = PriorityFeed(PGDSampler(8, 4, rule="topk"), model)
    >>> criterion = WeightedLoss(feed)
    >>> for indices in feed:
    ...     criterion(model(inputs[indices]), targets[indices]).backward()
    >>> feed.summary()["coverage"]
    0.5
    """

    learns = True

    def __init__(self, sampler: PGDSampler, model: nn.Module, *, layers: str = "last") -> None:
        super().__init__(sampler.num_samples, sampler.batch_size)
        self.sampler, self.layers = sampler, layers
        self.listener = LayerPriorities(model, layers)
        self.gradient = AggregatedGradient(self.listener.parameters, sampler.num_samples)
        self._trained, self._every = 0, EVERY[sampler.rule]
        # drawn and not trained; a loop may drop any number of batches
        self._ahead: deque[Batch] = deque(maxlen=4096)
        self._watch: RemovableHandle | None = None

    def next_batch(self) -> Batch:
        """Draw the next batch."""
        self._ahead.append(self.sampler.next_batch())
        self._aim()
        return self._ahead[-1]

    @property
    def _measures(self) -> bool:
        """Whether the batch to be trained next is measured."""
        return self._trained % self._every == 0

    def _aim(self) -> None:
        """Point along the present gradient if the next batch is measured."""
        self.listener.direction = {}
        if self._measures and self._ahead and self.gradient.covered:
            self.gradient.to_device()
            self.listener.direction = self.gradient.total

    def note_help(self) -> None:
        """Do nothing: a batch that was taken teaches nothing."""

    def _find(self, indices: Indices) -> Floats:
        """Return the weights of a batch that was drawn; those before it will not be trained."""
        for _ in range(len(self._ahead)):
            drawn, weights = self._ahead.popleft()
            if np.array_equal(drawn, indices):
                super().note_help()
                return weights
        raise invalid("indices", list(indices), "be of a batch drawn and not yet trained")

    def watch(self, indices: Indices, losses: Tensor) -> None:
        """Learn from the backward pass of these losses, when it has been run."""
        if self._watch is not None:
            # of a loss without a backward pass
            self._watch.remove()
        if not losses.requires_grad:
            return
        weights = self._find(indices)
        parameters = {n: p for n, p in self.gradient.parameters.items() if p.requires_grad}

        def end(gradients: Sequence[Tensor | None] | None, scale: float) -> None:
            # else a GradScaler skips this step
            if gradients is not None:
                found = dict.fromkeys(self.gradient.total)
                found |= dict(zip(parameters, gradients, strict=True))
                self._learn(indices, weights, scale, found)

        if self._measures and parameters:
            self._watch = on_backward(losses, weights, list(parameters.values()), end)
        else:
            losses.register_hook(lambda _: self._count())  # type: ignore[no-untyped-call]

    def on_batch(self, model: nn.Module, indices: Indices, losses: Tensor) -> int:
        """Learn from a model that has the gradient of ``(weights * losses).mean()``.

        Returns what that cost in forward passes of an example.
        """
        gradients = {name: p.grad for name, p in self.gradient.parameters.items()}
        if not self._learn(indices, self._find(indices), 1.0, gradients):
            return 0
        return len(indices) if self.layers == "all" else reading_cost(len(indices))

    def _learn(self, indices: Indices, weights: Floats, scale: float, gradients: Gradients) -> bool:
        """Learn from the gradients of the mean of ``weights * losses``; say if it was measured."""
        # Alg. 1, l. 9: the loss of example i had the factor scale * weight_i / batch
        measured = self.listener.collect(len(indices))
        # the next batch may be another sampler's
        self.listener.direction = {}
        if measured is not None:
            factors = weights * scale / (self.gradient.scale * len(indices))
            # l. 10: those of S and T are one batch
            self.sampler.update(indices, measured.cpu().numpy() / factors)
        if self._measures:
            # l. 11 and 22: a batch stands for those since the one measured before
            self.gradient.absorb(len(indices) * self._every, gradients)
        self._count()
        return measured is not None

    def _count(self) -> None:
        self._trained += 1
        self._aim()

    def full_pass(
        self, model: nn.Module, loss_fn: Loss, inputs: Tensor, targets: Tensor, *,
        batch_size: int = 512,
    ) -> None:  # fmt: skip
        """Take all examples' gradient and priorities first, as the paper: costs two epochs."""
        self.listener.direction = {}
        priorities, total = all_priorities(
            model, loss_fn, inputs, targets, names=self.gradient.parameters, batch_size=batch_size
        )
        self.gradient.total, self.gradient.covered = total, float(self.num_samples)
        self.sampler.update(np.arange(self.num_samples), priorities)

    def update(self, indices: Indices, scores: Floats) -> None:
        """Do nothing: training loops pass losses, not priorities."""

    def summary(self) -> dict[str, float]:
        """Describe the sampler's state for the history."""
        return self.sampler.summary()

    def state_dict(self) -> StateDict:
        """Return the state of the sampler and the aggregated gradient."""
        total = self.gradient.total.items()
        return self.sampler.state_dict() | {
            **{f"gradient.{name}": part.cpu().numpy().copy() for name, part in total},
            "gradient_covered": self.gradient.covered,
            "batches": self._trained,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        total = {f"gradient.{name}": part for name, part in self.gradient.total.items()}
        sums = {key: (tuple(part.shape), "f") for key, part in total.items()}
        check_state(state, {**sums, "gradient_covered": float, "batches": int}, "PriorityFeed")
        self.sampler.load_state_dict(state)
        for key, part in total.items():
            part.copy_(torch.from_numpy(np.asarray(state[key])))
        self.gradient.covered = float(state["gradient_covered"])
        self._trained = int(state["batches"])

    def close(self) -> None:
        """Take the hooks off the model."""
        self.listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


PGDSampler.feed = PriorityFeed

"""Feed PGD's sampler from the training step: the aggregated gradient, and the priorities."""

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
EVERY = {"topk": 1, "stochastic": 4}  # by rule: one batch in this many is measured


class AggregatedGradient:
    """Keep the sum of all N examples' gradients, along which priorities are taken (Eq. 9)."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], num_samples: int) -> None:
        self.parameters = dict(parameters)
        self.num_samples = num_samples
        self.total = {n: at_least_single(torch.zeros_like(p)) for n, p in parameters.items()}
        # Number of examples that the total covers. It follows Eq. 9 too, and corrects the total as
        # Adam corrects its moments.
        self.covered = 0.0

    @property
    def scale(self) -> float:
        """Factor from ``total`` to a sum over all N examples; 1 after some epochs."""
        return self.num_samples / self.covered if self.covered else 1.0

    @property
    def direction(self) -> dict[str, Tensor]:
        """The sum over N examples; zeros before the first batch."""
        return {name: part * self.scale for name, part in self.total.items()}

    def to_device(self) -> None:
        """Move the sum to the devices of the parameters."""
        for name, parameter in self.parameters.items():
            self.total[name] = self.total[name].to(parameter.device)

    def absorb(self, num_new: int, gradients: Gradients) -> None:
        """Add the mean gradient of a batch (Alg. 1, l. 22)."""
        self.to_device()
        # Eq. 9: gbar <- (1 - n / N) gbar + n g
        num_new = min(num_new, self.num_samples)
        kept_share = 1 - num_new / self.num_samples
        for name, total in self.total.items():
            total.mul_(kept_share)
            mean_gradient = gradients[name]
            if mean_gradient is not None:
                total.add_(mean_gradient, alpha=num_new)
        self.covered = kept_share * self.covered + num_new


class PriorityFeed(BatchSampler):
    """Draw PGD's batches and learn from the gradients that training computes anyway.

    As a DataLoader's ``batch_sampler`` it learns from the loss, ``WeightedLoss(feed)``. A loop that
    calls :meth:`next_batch` calls :meth:`on_batch` between ``backward`` and the optimizer's step.

    Priorities are taken along the gradient before this batch (Alg. 1, l. 20). ``topk`` measures
    every batch, ``stochastic`` one in 4, which stands for those before it. ValueError if a layer
    is not linear in its parameters or, at the first measured batch, if they are used outside it or
    examples are not in its first dimension: use :func:`~flwr_hetero.sampler.sample_priorities`.

    Parameters
    ----------
    sampler : PGDSampler
        Draws the batches.
    model : nn.Module
        The model that is trained. It has hooks until :meth:`close` or the end of a ``with`` block.
    layers : {"last", "all"}
        Whose parameters the priorities count. The last layer costs little and gives almost the
        same ranking; all layers cost about one more forward pass.

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
        self.sampler = sampler
        self.layers = layers
        self.listener = LayerPriorities(model, layers)
        self.gradient = AggregatedGradient(self.listener.parameters, sampler.num_samples)
        self._num_trained = 0
        self._every = EVERY[sampler.rule]
        # Batches drawn and not trained; a loop may drop any number of them.
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
        return self._num_trained % self._every == 0

    def _aim(self) -> None:
        """Set the direction to the present gradient if the next batch is measured."""
        self.listener.direction = {}
        if self._measures and self._ahead and self.gradient.covered:
            self.gradient.to_device()
            self.listener.direction = self.gradient.total

    def mark_trained(self) -> None:
        """Do nothing: the sampler learns only from a backward pass."""

    def _weights_of(self, indices: Indices) -> Floats:
        """Return the weights of a drawn batch; forget it and those before it."""
        for _ in range(len(self._ahead)):
            drawn, weights = self._ahead.popleft()
            if np.array_equal(drawn, indices):
                super().mark_trained()
                return weights
        raise invalid("indices", list(indices), "be of a batch drawn and not yet trained")

    def watch(self, indices: Indices, losses: Tensor) -> None:
        """Learn from the backward pass of these losses, at its end."""
        # The losses of the last batch may have had no backward pass.
        if self._watch is not None:
            self._watch.remove()
        if not losses.requires_grad:
            return
        weights = self._weights_of(indices)
        trained = {n: p for n, p in self.gradient.parameters.items() if p.requires_grad}

        def learn(gradients: Sequence[Tensor | None] | None, scale: float) -> None:
            # After an overflow there are no gradients, and a GradScaler skips the step.
            if gradients is not None:
                by_name = dict.fromkeys(self.gradient.total)
                by_name |= dict(zip(trained, gradients, strict=True))
                self._learn(indices, weights, scale, by_name)

        if self._measures and trained:
            self._watch = on_backward(losses, weights, list(trained.values()), learn)
        else:
            losses.register_hook(lambda _: self._count())  # type: ignore[no-untyped-call]

    def on_batch(self, model: nn.Module, indices: Indices, losses: Tensor) -> int:
        """Learn from a model that has the gradient of ``(weights * losses).mean()``.

        Returns the cost of measuring, in forward passes of an example.
        """
        gradients = {name: p.grad for name, p in self.gradient.parameters.items()}
        if not self._learn(indices, self._weights_of(indices), 1.0, gradients):
            return 0
        return len(indices) if self.layers == "all" else reading_cost(len(indices))

    def _learn(self, indices: Indices, weights: Floats, scale: float, gradients: Gradients) -> bool:
        """Learn from the gradients of the mean of ``weights * losses``; True if it was measured."""
        measured = self.listener.collect(len(indices))
        # The next batch in a backward pass may come from another sampler.
        self.listener.direction = {}
        if measured is not None:
            # Alg. 1, l. 9 and 10: the loss of example i had the factor scale * weight_i / batch.
            factors = weights * scale / (self.gradient.scale * len(indices))
            self.sampler.update(indices, measured.cpu().numpy() / factors)
        if self._measures:
            # l. 11 and 22: this batch also stands for those that were not measured.
            self.gradient.absorb(len(indices) * self._every, gradients)
        self._count()
        return measured is not None

    def _count(self) -> None:
        self._num_trained += 1
        self._aim()

    def full_pass(
        self, model: nn.Module, loss_fn: Loss, inputs: Tensor, targets: Tensor, *,
        batch_size: int = 512,
    ) -> None:  # fmt: skip
        """Compute all gradients and priorities before training, as the paper; costs two epochs."""
        self.listener.direction = {}
        priorities, self.gradient.total = all_priorities(
            model, loss_fn, inputs, targets, names=self.gradient.parameters, batch_size=batch_size
        )
        self.gradient.covered = float(self.num_samples)
        self.sampler.update(np.arange(self.num_samples), priorities)

    def summary(self) -> dict[str, float]:
        """Describe the sampler's state for the history."""
        return self.sampler.summary()

    def state_dict(self) -> StateDict:
        """Return the state of the sampler and the aggregated gradient."""
        total = self.gradient.total.items()
        return self.sampler.state_dict() | {
            **{f"gradient.{name}": part.cpu().numpy().copy() for name, part in total},
            "gradient_covered": self.gradient.covered,
            "batches": self._num_trained,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        total = {f"gradient.{name}": part for name, part in self.gradient.total.items()}
        shapes = {key: (tuple(part.shape), "f") for key, part in total.items()}
        check_state(state, {**shapes, "gradient_covered": float, "batches": int}, "PriorityFeed")
        self.sampler.load_state_dict(state)
        for key, part in total.items():
            part.copy_(torch.from_numpy(np.asarray(state[key])))
        self.gradient.covered = float(state["gradient_covered"])
        self._num_trained = int(state["batches"])

    def close(self) -> None:
        """Take the hooks off the model."""
        self.listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


PGDSampler.feed = PriorityFeed

"""PGD's sampler, and the feed that gives it the priorities of the training step."""

from collections import deque
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flwr_hetero.client.batch_sampler import Batch, BatchSampler, coverage_and_age
from flwr_hetero.client.device import reading_cost
from flwr_hetero.client.weighted_loss import Loss, on_backward
from flwr_hetero.errors import check_choice, check_number, invalid
from flwr_hetero.pgd import algorithm
from flwr_hetero.pgd.algorithm import Floats, Indices, Trend
from flwr_hetero.pgd.priorities import (
    AggregatedGradient,
    Gradients,
    LayerPriorities,
    all_priorities,
)
from flwr_hetero.state_dict import StateDict, check_state

RULES = ("stochastic", "topk")
EVERY = {"topk": 1, "stochastic": 4}  # by rule: one batch in this many is measured


class PGDSampler(BatchSampler):
    r"""Prioritised gradient descent: prefer examples whose gradient agrees with that of all.

    ``update`` is given signed priorities :math:`p_i = \bar g \cdot g_i`, which
    :class:`~flwr_hetero.sampler.PriorityFeed` takes from the training step. Zhou and Gao,
    "Distributed Framework for Accelerating Training of Deep Learning Models through
    Prioritization", sections III and IV.

    Parameters
    ----------
    num_samples, batch_size, seed : int
        As of :class:`~flwr_hetero.sampler.BatchSampler`.
    rule : {"stochastic", "topk"}
        ``stochastic``: each epoch is a shuffle in which example i occurs about :math:`N q_i`
        times, with :math:`q_i = (1 - \lambda) \sqrt{|p_i|} / \sum \sqrt{|p|} + \lambda / N` and
        weight :math:`1 / (N q_i)`: unbiased, however old the priorities. ``topk``: the paper's
        Algorithm 1 with aggressive updates (PGD-A), round-robin plus top: biased, and behind
        uniform sampling in all our trials (``flwr_hetero_studies/papers/pgd``).
    renewal_share : float
        :math:`r / (k + r)` in (0, 1]: part of a batch that is taken whatever its priority, in turn
        or uniformly (:math:`\lambda`).

    Examples
    --------
    >>> sampler = PGDSampler(4, 2, seed=0, rule="topk")
    >>> sampler.update(np.arange(4), np.array([5.0, -1.0, 0.2, 0.1]))
    >>> indices, weights = sampler.next_batch()
    >>> int(indices[1]), weights.tolist()
    (0, [1.0, 1.0])
    """

    settings = (*BatchSampler.settings, "rule")
    learns_from = "priority"
    learns = True
    hint = (
        "give the DataLoader batch_sampler=PriorityFeed(sampler, model), "
        "and take as loss: criterion = WeightedLoss(loader.batch_sampler)"
    )

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        rule: str = "stochastic",
        renewal_share: float = 0.5,
    ) -> None:
        super().__init__(num_samples, batch_size, seed=seed)
        self.rule = check_choice("rule", rule, RULES)
        self.renewal_share = check_number("renewal_share", renewal_share, "(0, 1]")
        self.trend = algorithm.start_trend(self.num_samples)
        self.iteration = 0
        # With topk: the round-robin, and how many examples were taken from it.
        # With stochastic: the epoch with its weights, and how much of it was drawn.
        self.order = self.rng.permutation(self.num_samples)
        self.weights = np.ones(self.num_samples)
        self.position = 0 if rule == "topk" else self.num_samples

    @property
    def num_renewed(self) -> int:
        """Examples in a batch of ``topk`` that are taken in turn."""
        size = min(self.batch_size, self.num_samples)
        # The first epoch takes the place of the paper's initial pass over the data.
        if self.position < self.num_samples and (self.trend.computed_at < 0).any():
            return size
        return max(1, round(self.renewal_share * size))

    def next_batch(self) -> Batch:
        """Draw the next batch with its weights; at most N examples, each once with ``topk``."""
        if self.rule == "topk":
            size = min(self.batch_size, self.num_samples)
            num_renewed = self.num_renewed
            indices = algorithm.choose_batch(
                self.trend,
                self.order,
                turn=self.position,
                iteration=self.iteration,
                num_renewed=num_renewed,
                num_top=size - num_renewed,
            )
            self.position += num_renewed
            return indices, np.ones(size)
        self.iteration += 1
        if self.position >= self.num_samples:
            counts = algorithm.expected_counts(self.trend.priority, self.renewal_share)
            self.order = algorithm.weighted_shuffle(counts, self.rng)
            self.weights = 1.0 / counts[self.order]
            self.position = 0
        # The last batch of an epoch may be smaller.
        batch = slice(self.position, self.position + self.batch_size)
        self.position = min(batch.stop, self.num_samples)
        return self.order[batch], self.weights[batch]

    def update(self, indices: Indices, scores: Floats) -> None:
        """Learn the signed priorities of a batch, or of all examples (the paper's first pass)."""
        index, priority = self.check_scores(indices, scores)
        # Alg. 1, l. 10 and 21
        self.trend = algorithm.learn(self.trend, index, priority, self.iteration)
        if self.rule == "topk":
            self.iteration += 1
        elif len(index) == self.num_samples == len(np.unique(index)):
            # New priorities of all examples begin a new epoch.
            self.position = self.num_samples

    def fed_by(self, model: nn.Module) -> BatchSampler:
        """Return a PriorityFeed, which learns from the gradients of this model."""
        return PriorityFeed(self, model)

    def summary(self) -> dict[str, float]:
        """Describe the state for the history: coverage, and mean age in batches."""
        return coverage_and_age(self.trend.computed_at, self.iteration)

    def state_dict(self) -> StateDict:
        """Return all that is needed to continue: 32 bytes a sample."""
        return super().state_dict() | {
            "order": self.order.astype(np.int32),
            "weights": self.weights.copy(),
            "priority": self.trend.priority.copy(),
            "slope": self.trend.slope.copy(),
            "computed_at": self.trend.computed_at.astype(np.int32),
            "position": self.position,
            "iteration": self.iteration,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        kinds = {"order": "i", "weights": "f", "priority": "f", "slope": "f", "computed_at": "i"}
        arrays = {name: ((self.num_samples,), kind) for name, kind in kinds.items()}
        check_state(state, {**arrays, "position": int, "iteration": int}, type(self).__name__)
        super().load_state_dict(state)
        saved = {name: np.array(state[name], f"{kind}8") for name, kind in kinds.items()}
        self.order = saved["order"]
        self.weights = saved["weights"]
        self.trend = Trend(saved["priority"], saved["slope"], saved["computed_at"])
        self.position = int(state["position"])
        self.iteration = int(state["iteration"])


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

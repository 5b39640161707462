"""PGD's sampler: the paper's batches of Algorithm 1, or a shuffle by priority."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from flwr_hetero.client.batch_sampler import Batch, BatchSampler, coverage_and_age
from flwr_hetero.errors import check_choice, check_number
from flwr_hetero.pgd import algorithm
from flwr_hetero.pgd.algorithm import Floats, Indices, Trend
from flwr_hetero.state_dict import StateDict, check_state

RULES = ("stochastic", "topk")


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
    feed: ClassVar[Callable[["PGDSampler", Any], BatchSampler]]
    """PriorityFeed, whose module imports this one and sets this."""

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

    def fed_by(self, model: Any) -> BatchSampler:
        """Return a PriorityFeed, which learns from the gradients of this model."""
        return type(self).feed(self, model)

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

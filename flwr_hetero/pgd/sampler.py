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

    ``update`` takes signed priorities :math:`p_i = \bar g \cdot g_i`, which
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
        :math:`r / (k + r)` in (0, 1]: part of a batch taken regardless of priority, in turn
        or uniformly (:math:`\lambda`).

    Examples
    --------
    >>> sampler = PGDSampler(4, 2, seed=0, rule="topk")
    >>> sampler.update(np.arange(4), np.array([5.0, -1.0, 0.2, 0.1]))
    >>> indices, weights = sampler.next_batch()
    >>> int(indices[1]), weights.tolist()
    (0, [1.0, 1.0])
    """

    learns_from = "priority"
    learns = True
    hint = (
        "give the DataLoader batch_sampler=PriorityFeed(sampler, model), "
        "and take as loss: criterion = WeightedLoss(loader.batch_sampler)"
    )
    feed: ClassVar[Callable[["PGDSampler", Any], BatchSampler]]
    """PriorityFeed, which needs torch and says so itself."""

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
        self.trend, self.iteration = algorithm.start_trend(self.num_samples), 0
        # topk: the round-robin, and examples taken from it; stochastic: an epoch and its place
        self.order = self.rng.permutation(self.num_samples)
        self.weights = np.ones(self.num_samples)
        self.position = 0 if rule == "topk" else self.num_samples

    @property
    def num_renewed(self) -> int:
        """Examples of a batch of ``topk`` that are taken in turn."""
        size = min(self.batch_size, self.num_samples)
        # the paper's initial pass over the data, spread over the first epoch
        if self.position < self.num_samples and (self.trend.computed_at < 0).any():
            return size
        return max(1, round(self.renewal_share * size))

    def next_batch(self) -> Batch:
        """Draw the next batch with its weights; at most N examples, each once with ``topk``."""
        if self.rule == "topk":
            # Alg. 1, l. 4 to 15: S, then T
            size, num_renewed = min(self.batch_size, self.num_samples), self.num_renewed
            share = {"num_renewed": num_renewed, "num_top": size - num_renewed}
            place = self.position, self.iteration
            indices = algorithm.choose_batch(self.trend, self.order, *place, **share)
            self.position += num_renewed
            return indices, np.ones(size)
        self.iteration += 1
        if self.position >= self.num_samples:
            counts = algorithm.expected_counts(self.trend.priority, self.renewal_share)
            self.order, self.position = algorithm.weighted_shuffle(counts, self.rng), 0
            self.weights = 1.0 / counts[self.order]
        # the last batch of an epoch may be smaller
        part = slice(self.position, self.position + self.batch_size)
        self.position = min(self.position + self.batch_size, self.num_samples)
        return self.order[part], self.weights[part]

    def update(self, indices: Indices, scores: Floats) -> None:
        """Learn the signed priorities of a batch, or of all examples (the paper's first pass)."""
        index, priority = self.check_scores(indices, scores)
        # Alg. 1, l. 10 and 21
        self.trend = algorithm.learn(self.trend, index, priority, self.iteration)
        if self.rule == "topk":
            self.iteration += 1
        elif len(index) == self.num_samples == len(np.unique(index)):
            self.position = self.num_samples  # all are new: so is the epoch

    def fed_by(self, model: Any) -> BatchSampler:
        """Return a PriorityFeed, which learns from the gradients of this model."""
        return type(self).feed(self, model)

    def summary(self) -> dict[str, float]:
        """Describe the state for the history: coverage, and mean age in batches."""
        return coverage_and_age(self.trend.computed_at, self.iteration)

    def state_dict(self) -> StateDict:
        """Return all that is needed to continue: 32 bytes a sample."""
        arrays = {"order": self.order, "weights": self.weights, **self.trend._asdict()}
        # whole numbers in four bytes
        kinds: dict[str, Any] = {"i": np.int32, "f": np.float64}
        kept = {name: values.astype(kinds[values.dtype.kind]) for name, values in arrays.items()}
        own = {"rule": self.rule, "position": self.position, "iteration": self.iteration}
        return super().state_dict() | kept | own

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        num, owner = self.num_samples, type(self).__name__
        kinds = {"order": "i", "weights": "f", "priority": "f", "slope": "f", "computed_at": "i"}
        vectors = {name: ((num,), kind) for name, kind in kinds.items()}
        check_state(state, vectors | {"rule": str, "position": int, "iteration": int}, owner)
        if state["rule"] != self.rule:
            raise ValueError(f"state of {owner} must hold rule={self.rule}, got {state['rule']}.")
        order, weights, *trend = (np.asarray(state[n]).astype(f"{kinds[n]}8") for n in vectors)
        super().load_state_dict(state)
        self.order, self.weights, self.trend = order, weights, Trend(*trend)
        self.position, self.iteration = int(state["position"]), int(state["iteration"])

"""PGD's sampler: the paper's batches of Algorithm 1, or a shuffle by priority."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.client.batch_sampler import (
    Batch,
    BatchSampler,
    check_permutation,
    coverage_and_age,
)
from flwr_hetero.errors import check_choice, check_number
from flwr_hetero.pgd.algorithm import Trend, choose_batch, learn, start_trend
from flwr_hetero.pgd.priority_shuffle import PriorityShuffle
from flwr_hetero.state_dict import StateDict, check_state

RULES = ("stochastic", "topk")


class PGDSampler(BatchSampler):
    r"""Prioritised gradient descent: prefer examples whose gradient agrees with that of all.

    ``update`` takes signed priorities :math:`p_i = \bar g \cdot g_i`, from
    :func:`~flwr_hetero.sampler.sample_priorities` or, cheaper, from the training step itself
    by :class:`~flwr_hetero.sampler.PriorityFeed`.

    Parameters
    ----------
    num_samples : int
        Size N of the local data set.
    batch_size : int
        Examples per batch, :math:`(k + r) N` in the paper.
    seed : int, keyword-only
        Seed of the sampler's own random generator.
    rule : {"stochastic", "topk"}
        How a batch is drawn and weighted:

        - ``stochastic``: with probability
          :math:`q_i = (1 - \lambda) \sqrt{|p_i|} / \sum \sqrt{|p|} + \lambda / N` and weight
          :math:`1 / (N q_i)`: unbiased, however old the priorities. Each epoch is a shuffle
          in which example i occurs about :math:`N q_i` times. While the ``gate`` is closed the
          batches are those of uniform sampling.
        - ``topk``: the paper's Algorithm 1 with aggressive updates (PGD-A), round-robin plus
          top. Biased.
    renewal_share : float
        :math:`r / (k + r)` in (0, 1]: part of a batch taken regardless of priority, in turn
        or uniformly (:math:`\lambda`).
    gate : float
        ``stochastic`` draws by priority only while priorities reduce the second moment of the
        gradient by this factor, as measured on batches that come with gradient norms; 0 keeps
        the gate open.

    Raises
    ------
    ValueError
        If an argument is out of its range.

    Notes
    -----
    ``stochastic`` is not the paper's. It is the default because ``topk`` loses to uniform
    sampling in all our trials (``flwr_hetero_studies/papers/pgd``): the mean gradient of the top
    examples is biased and too long. The square root is the exponent of least variance among
    1, 1/2 and 0.

    References
    ----------
    Zhou and Gao, "Distributed Framework for Accelerating Training of Deep Learning Models through
    Prioritization", sections III and IV.

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
    feed: ClassVar[Callable[["PGDSampler", Any], BatchSampler] | None] = None
    """Makes a sampler that learns from a model's gradients; PriorityFeed, which needs torch."""

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        rule: str = "stochastic",
        renewal_share: float = 0.5,
        gate: float = 1.5,
    ) -> None:
        super().__init__(num_samples, batch_size, seed=seed)
        self.rule = check_choice("rule", rule, RULES)
        self.renewal_share = check_number("renewal_share", renewal_share, "(0, 1]")
        gate = check_number("gate", gate, "[0, inf)")
        self.draw: PriorityShuffle | TopPriority
        if rule == "stochastic":
            self.draw = PriorityShuffle(
                num_samples, batch_size, seed=seed, mixing=self.renewal_share, gate=gate
            )
        else:
            num_renewed = max(1, round(renewal_share * min(self.batch_size, self.num_samples)))
            self.draw = TopPriority(num_samples, batch_size, seed=seed, num_renewed=num_renewed)

    @property
    def is_open(self) -> bool:
        """Whether batches are drawn by priority; always, unless the gate is closed."""
        return self.draw.is_open

    def fed_by(self, model: Any) -> BatchSampler:
        """Return a PriorityFeed, which learns from the gradients of this model."""
        make = type(self).feed
        return self if make is None else make(self, model)

    def next_batch(self) -> Batch:
        """Draw the next batch with its weights; at most N examples, each once with ``topk``."""
        return self.draw.next_batch()

    def update(
        self,
        indices: NDArray[np.int64],
        scores: NDArray[np.float64],
        norms: NDArray[np.float64] | None = None,
        weights: NDArray[np.float64] | None = None,
    ) -> None:
        r"""Learn the signed priorities of a batch, or of all examples (the paper's first pass).

        For the gate: ``norms``, the gradient norms up to a common factor, :math:`\sqrt{|p|}` if
        left out; and the ``weights`` with which the batch was drawn, those of the last if left
        out.
        """
        self.draw.update(indices, scores, norms, weights)

    def summary(self) -> dict[str, float]:
        """Describe the state of the rule for the history: coverage, mean age, ..."""
        return self.draw.summary()

    def state_dict(self) -> StateDict:
        """Return all that is needed to continue; about 25 bytes a sample."""
        return self.draw.state_dict() | {"rule": self.rule}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        check_state(state, {"rule": str}, "PGDSampler")
        if state["rule"] != self.rule:
            raise ValueError(
                f"state of PGDSampler must hold rule={self.rule}, got {state['rule']}."
            )
        self.draw.load_state_dict(state)


class TopPriority(BatchSampler):
    """The rule ``topk``: Algorithm 1.

    Until every example had its turn or a priority, whole batches are taken in turn: the paper's
    initial pass over the data, spread over the first epoch.
    """

    is_open = True

    def __init__(self, num_samples: int, batch_size: int, *, seed: int, num_renewed: int) -> None:
        super().__init__(num_samples, batch_size, seed=seed)
        self.num_renewed = num_renewed
        self.order = self.rng.permutation(self.num_samples)
        self.trend = start_trend(self.num_samples)
        self.turns = self.iteration = 0

    @property
    def is_warming_up(self) -> bool:
        """Whether some examples had neither a turn nor a priority yet."""
        return self.turns < self.num_samples and bool((self.trend.computed_at < 0).any())

    def next_batch(self) -> Batch:
        """Take the next examples in turn (first) and those of highest priority (last)."""
        size = min(self.batch_size, self.num_samples)
        in_turn = size if self.is_warming_up else min(self.num_renewed, size)
        share = {"num_renewed": in_turn, "num_top": size - in_turn}
        indices = choose_batch(self.trend, self.order, self.turns, self.iteration, **share)
        self.turns += in_turn
        return indices, np.ones(size)

    def update(
        self, indices: NDArray[np.int64], scores: NDArray[np.float64], *for_gate: object
    ) -> None:
        """Learn the priorities of S and T (Algorithm 1, lines 10 and 21)."""
        index, priority = self.check_scores(indices, scores)
        self.trend = learn(self.trend, index, priority, self.iteration)
        self.iteration += 1

    def summary(self) -> dict[str, float]:
        """Return coverage, share of negative priorities and mean age in iterations."""
        priority = self.trend.priority[self.trend.computed_at >= 0]
        negative = float((priority < 0).mean()) if priority.size else 0.0
        return {
            "negative-share": negative,
            **coverage_and_age(self.trend.computed_at, self.iteration),
        }

    def state_dict(self) -> StateDict:
        """Return sizes, generator, turn and trend: 24 bytes a sample."""
        return super().state_dict() | {
            "order": self.order.astype(np.int32),
            "priority": self.trend.priority.copy(),
            "slope": self.trend.slope.copy(),
            "computed_at": self.trend.computed_at.astype(np.int32),
            "turns": self.turns,
            "iteration": self.iteration,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        kinds = {"order": "i", "priority": "f", "slope": "f", "computed_at": "i"}
        vectors = {name: ((self.num_samples,), kind) for name, kind in kinds.items()}
        check_state(state, vectors | {"turns": int, "iteration": int}, "TopPriority")
        order, priority, slope, computed_at = (np.asarray(state[name]) for name in vectors)
        turns, iteration = int(state["turns"]), int(state["iteration"])
        check_permutation(order, "TopPriority")
        if not np.isfinite(slope).all() or np.isinf(priority).any() or min(turns, iteration) < 0:
            raise ValueError("state of TopPriority must hold finite numbers and counts from 0.")
        super().load_state_dict(state)
        self.order, self.turns, self.iteration = order.astype(np.int64), turns, iteration
        self.trend = Trend(
            priority.astype(np.float64), slope.astype(np.float64), computed_at.astype(np.int64)
        )

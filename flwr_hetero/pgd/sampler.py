"""PGD's unbiased draw: reshuffling by priority, but only while that is worth it."""

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.client.batch_sampler import BatchSampler
from flwr_hetero.client.gate import Moments, check_importance, observe, variance_ratio
from flwr_hetero.errors import invalid
from flwr_hetero.pgd.algorithm import (
    Trend,
    batch_parts,
    estimate,
    learn,
    pick_top,
    shares,
    start_trend,
    top_scale,
    weighted_shuffle,
)
from flwr_hetero.state_dict import StateDict

MEMORY = 2048.0
"""Measured examples after which the gate's evidence has faded to 1/e."""


HARMLESS = 0.95
"""Least ratio of second moments by what is known, with which the gate stays open."""


class PriorityShuffle(BatchSampler):
    r"""Each epoch is a shuffle in which an example stands about :math:`N q_i` times.

    Used through :class:`~flwr_hetero.sampler.PGDSampler`, which checks the other arguments.
    While the gate is closed the batches are those of
    :class:`~flwr_hetero.client.batch_sampler.UniformSampler` with the same seed.

    Notes
    -----
    Priorities count from the next epoch on; the first one with the gate open begins at once.

    While few batches are measured most of what is known is old or missing and says little of
    what would be gained with the gate open. So it opens by the *fresh* ratio, of draws by the
    priorities that a batch has just now, and stays open unless draws by what is known would do
    harm (a ratio under 0.95).
    """

    def __init__(
        self, num_samples: int, batch_size: int, *, seed: int = 0, mixing: float, gate: float
    ) -> None:
        super().__init__(num_samples, batch_size, seed=seed)
        if not (np.isfinite(gate) and gate >= 0.0):
            raise invalid("gate", gate, "be at least 0 and finite", "0 takes its effect away")
        self.mixing, self.gate = float(mixing), float(gate)
        self.order = self.rng.permutation(self.num_samples)
        self.weights = np.ones(self.num_samples)
        self.position, self.by_priority = 0, False
        self.importance = np.zeros(self.num_samples, dtype=np.float32)
        self.scored_at = np.full(self.num_samples, -1, dtype=np.int32)
        self.moments = self.fresh = Moments()
        self.steps = 0

    @property
    def is_open(self) -> bool:
        """Whether priorities pay, as far as measured."""
        pays = variance_ratio(self.fresh) >= self.gate and variance_ratio(self.moments) >= HARMLESS
        return self.gate == 0.0 or pays

    def next_batch(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Take the next entries of the epoch with their weights :math:`1 / (N q_i)`."""
        self.steps += 1
        if self.position >= self.num_samples or (self.is_open and not self.by_priority):
            self._begin_epoch()
        self.position = min(self.position + self.batch_size, self.num_samples)
        return self._last_batch()

    def _last_batch(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        part = slice((self.position - 1) // self.batch_size * self.batch_size, self.position)
        return self.order[part], self.weights[part]

    def _begin_epoch(self) -> None:
        self.position, self.by_priority = 0, self.is_open
        if self.by_priority:
            expected = self._shares()
            self.order = weighted_shuffle(expected, self.rng)
            self.weights = 1.0 / expected[self.order]
        else:
            self.order = self.rng.permutation(self.num_samples)
            self.weights = np.ones(self.num_samples)

    def update(
        self,
        indices: NDArray[np.int64],
        scores: NDArray[np.float64],
        norms: NDArray[np.float64] | None = None,
    ) -> None:
        """Learn importance, and look what drawing by it gains or would gain."""
        index, score = self.check_scores(indices, scores)
        norm = score if norms is None else np.asarray(norms, dtype=np.float64)
        if norm.shape != score.shape:
            raise invalid("norms", norm.shape, f"have the shape {score.shape}", "pass one each")
        check_importance(score)
        check_importance(norm)
        if not len(index):
            return
        everything = len(index) == self.num_samples == len(np.unique(index))
        if everything:  # all by one model: the gain of the new shares is known exactly
            self._note(index, score)
            self.moments = self.fresh = Moments()
        expected = self._shares(index)
        drawn = np.ones(len(index)) if everything else self._weights_of(index, expected)
        mean, mean_norm = (float(drawn @ part) / drawn.sum() for part in (score, norm))
        fresh = shares(score.astype(np.float32), np.ones(len(index), bool), mean, self.mixing)
        relative = norm / (mean_norm or 1.0)  # norms shrink in training
        self.moments = observe(self.moments, relative, drawn, 1.0 / expected, MEMORY)
        self.fresh = observe(self.fresh, relative, drawn, 1.0 / fresh, MEMORY)
        if not everything:
            self._note(index, score)
        elif self.is_open:
            self.position = self.num_samples

    def _weights_of(
        self, index: NDArray[np.int64], expected: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the weights with which these were drawn; of an earlier batch about."""
        last, weights = self._last_batch()
        if np.array_equal(index, last):
            return weights
        return 1.0 / expected if self.by_priority else np.ones(len(index))

    def _note(self, index: NDArray[np.int64], score: NDArray[np.float64]) -> None:
        self.importance[index], self.scored_at[index] = score, self.steps

    def _shares(self, index: NDArray[np.int64] | slice = slice(None)) -> NDArray[np.float64]:
        known = self.scored_at >= 0
        mean = float(self.importance.sum(dtype=np.float64)) / max(1, int(known.sum()))
        return shares(self.importance[index], known[index], mean, self.mixing)

    def summary(self) -> dict[str, float]:
        """Describe the state of the sampling in a few figures."""
        known = self.scored_at >= 0
        ages = self.steps - self.scored_at[known]
        return {
            "coverage": float(known.mean()),
            "mean-age": float(ages.mean()) if ages.size else 0.0,
            "effective-share": float(1.0 / (1.0 / self._shares()).mean()),
            "variance-ratio": variance_ratio(self.moments),
            "variance-ratio-fresh": variance_ratio(self.fresh),
            "importance-open": float(self.is_open),
        }

    def state_dict(self) -> StateDict:
        """Return sizes, generator, epoch, importance and evidence: 20 bytes a sample."""
        return super().state_dict() | {
            "order": self.order.astype(np.int32),
            "weights": self.weights.copy(),
            "importance": self.importance.copy(),
            "scored_at": self.scored_at.copy(),
            "position": self.position,
            "by_priority": self.by_priority,
            "steps": self.steps,
            "moment_uniform": self.moments.uniform,
            "moment_importance": self.moments.importance,
            "fresh_uniform": self.fresh.uniform,
            "fresh_importance": self.fresh.importance,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        try:
            vectors = {name: np.asarray(state[name]) for name in _VECTORS}
            position, steps = int(state["position"]), int(state["steps"])
            by_priority = bool(int(state["by_priority"]))
            moments, fresh = (
                Moments(float(state[f"{name}_uniform"]), float(state[f"{name}_importance"]))
                for name in ("moment", "fresh")
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"sampler state is damaged ({error!r}): start afresh.") from error
        if any(
            v.shape != (self.num_samples,) or v.dtype.kind != _VECTORS[n]
            for n, v in vectors.items()
        ):
            raise ValueError("sampler state holds vectors of another shape or kind: start afresh.")
        order, weights = vectors["order"].astype(np.int64), vectors["weights"].astype(np.float64)
        inside = (order >= 0).all() and (order < self.num_samples).all()
        light = (weights > 0.0).all() and (weights <= 1.0 / self.mixing * (1 + 1e-6)).all()
        figures = np.isfinite([*moments, *fresh]).all() and min(*moments, *fresh, steps) >= 0
        if not (inside and light and figures and 0 <= position <= self.num_samples):
            raise ValueError("sampler state holds impossible figures: start afresh.")
        check_importance(vectors["importance"].astype(np.float64))
        super().load_state_dict(state)
        self.order, self.weights, self.position = order, weights, position
        self.importance = vectors["importance"].astype(np.float32)
        self.scored_at = vectors["scored_at"].astype(np.int32)
        self.by_priority, self.steps = by_priority, steps
        self.moments, self.fresh = moments, fresh


_VECTORS = {"order": "i", "weights": "f", "importance": "f", "scored_at": "i"}


MEMORY_OF_TOP_PRIORITY = 0.9
"""Share of the past in the running mean priorities of the two parts of a batch."""


class TopPriority(BatchSampler):
    """Algorithm 1: a batch holds the next examples in turn and those of highest priority.

    Used through :class:`~flwr_hetero.sampler.PGDSampler`, which checks the arguments.

    Notes
    -----
    Until every example had its turn or a priority, whole batches are taken in turn: the
    paper's initial pass over the data, amortised. Giving ``update`` the priorities of all
    examples before the first batch is the paper's own initial pass. Examples taken in turn
    are not taken for their priority a second time in the same batch.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        num_renewed: int,
        smoothing: float = 0.8,
        aggressive: bool = True,
        normalised: bool = False,
    ) -> None:
        super().__init__(num_samples, batch_size, seed=seed)
        self.num_renewed, self.smoothing = num_renewed, smoothing
        self.aggressive, self.normalised = aggressive, normalised
        self.order = self.rng.permutation(self.num_samples)
        self.trend = start_trend(self.num_samples)
        self.turns = self.iteration = 0
        self.drawn_top = np.zeros(self.num_samples, dtype=bool)
        self.progress = np.full(2, np.nan)

    @property
    def is_warming_up(self) -> bool:
        """Whether some examples had neither a turn nor a priority yet."""
        return self.turns < self.num_samples and bool((self.trend.computed_at < 0).any())

    @property
    def scale(self) -> float:
        """Weight of the top part: 1 unless normalised."""
        known = self.normalised and not np.isnan(self.progress).any()
        return top_scale(*self.progress) if known else 1.0

    def next_batch(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Take the next examples in turn (first) and those of highest priority (last)."""
        size = min(self.batch_size, self.num_samples)
        in_turn = size if self.is_warming_up else min(self.num_renewed, size)
        renewed = self.order[(self.turns + np.arange(in_turn)) % self.num_samples]
        self.turns += in_turn
        top = pick_top(estimate(self.trend, self.iteration), size - in_turn, renewed)
        self.drawn_top[renewed], self.drawn_top[top] = False, True
        weights = np.ones(size)
        weights[in_turn:] = self.scale
        if not self.aggressive and len(top):
            weights[:in_turn], weights[in_turn:] = 0.0, size / len(top)
        return np.concatenate([renewed, top]), weights

    def update(self, indices: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """Learn the signed priorities of processed examples; see the parent for errors."""
        index, priority = self.check_scores(indices, scores)
        top = self.drawn_top[index]
        if top.any() and not top.all():
            means = np.array([priority[~top].mean(), priority[top].mean()])
            past = np.where(np.isnan(self.progress), means, self.progress)
            self.progress = MEMORY_OF_TOP_PRIORITY * past + (1 - MEMORY_OF_TOP_PRIORITY) * means
        if not self.aggressive:
            index, priority = index[~top], priority[~top]
        rows = learn(self.trend.rows(index), priority, self.iteration, self.smoothing)
        self.trend.put(index, rows)
        self.drawn_top[index] = False
        self.iteration += 1

    def summary(self) -> dict[str, float]:
        """Describe the priorities in a few figures."""
        known = self.trend.computed_at >= 0
        ages, priority = self.iteration - self.trend.computed_at[known], self.trend.priority[known]
        return {
            "coverage": float(known.mean()),
            "negative-share": float((priority < 0).mean()) if priority.size else 0.0,
            "mean-age": float(ages.mean()) if ages.size else 0.0,
            "top-scale": self.scale,
        }

    def state_dict(self) -> StateDict:
        """Return sizes, generator, turn and trend: 25 bytes a sample."""
        return super().state_dict() | {
            "order": self.order.astype(np.int32),
            "priority": self.trend.priority.copy(),
            "slope": self.trend.slope.copy(),
            "computed_at": self.trend.computed_at.astype(np.int32),
            "drawn_top": self.drawn_top.copy(),
            "progress": self.progress.copy(),
            "turns": self.turns,
            "iteration": self.iteration,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        try:
            vectors = {name: np.asarray(state[name]) for name in _VECTORS_OF_TOP_PRIORITY}
            progress = np.array(state["progress"], dtype=np.float64)
            turns, iteration = int(state["turns"]), int(state["iteration"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"sampler state is damaged ({error!r}): start afresh.") from error
        if any(
            v.shape != (self.num_samples,) or v.dtype.kind != _VECTORS_OF_TOP_PRIORITY[n]
            for n, v in vectors.items()
        ):
            raise ValueError("sampler state holds vectors of another shape or kind: start afresh.")
        order = vectors["order"].astype(np.int64)
        if not np.array_equal(np.sort(order), np.arange(self.num_samples)):
            raise ValueError("sampler state holds no permutation of the data: start afresh.")
        finite = np.isfinite(vectors["slope"]) & ~np.isinf(vectors["priority"])
        if not finite.all() or progress.shape != (2,) or min(turns, iteration) < 0:
            raise ValueError("sampler state holds impossible figures: start afresh.")
        super().load_state_dict(state)
        self.order, self.turns, self.iteration, self.progress = order, turns, iteration, progress
        self.drawn_top = vectors["drawn_top"].copy()
        self.trend = Trend(
            vectors["priority"].astype(np.float64),
            vectors["slope"].astype(np.float64),
            vectors["computed_at"].astype(np.int64),
        )


_VECTORS_OF_TOP_PRIORITY = {
    "order": "i",
    "priority": "f",
    "slope": "f",
    "computed_at": "i",
    "drawn_top": "b",
}


RULES = ("stochastic", "topk", "topk-normalised")


class PGDSampler(BatchSampler):
    r"""Prioritised gradient descent: prefer examples whose gradient follows everyone's.

    ``update`` takes signed priorities :math:`p_i = \bar g \cdot g_i`, from
    :func:`~flwr_hetero.sampler.sample_priorities` or, cheaper, from the training step itself
    by :class:`~flwr_hetero.sampler.PriorityFeed`.

    Parameters
    ----------
    num_samples : int
        Size N of the local data set.
    batch_size : int
        Examples per batch, :math:`(k + r) N` in the paper; at most N where the rule does
        not draw with replacement.
    seed : int, keyword-only
        Seed of the sampler's own random generator.
    rule : {"stochastic", "topk", "topk-normalised"}
        How a batch is drawn and weighted:

        - ``stochastic``: with probability
          :math:`q_i = (1 - \lambda) \sqrt{|p_i|} / \sum \sqrt{|p|} + \lambda / N` and weight
          :math:`1 / (N q_i)`: unbiased, however old the priorities. Each epoch is a shuffle
          that holds example i about :math:`N q_i` times. The very batches of uniform sampling
          while the ``gate`` is closed.
        - ``topk``: the paper's Algorithm 1, renewed in turn plus top. Biased.
        - ``topk-normalised``: the same with the top part weighted down to the progress of the
          renewed part.
    renewal_share : float
        :math:`r / (k + r)` in (0, 1]: part of a batch taken regardless of priority, in turn
        or uniformly (:math:`\lambda`).
    smoothing : float
        Algorithm 2's lambda in [0, 1], for the two rules of the paper.
    aggressive : bool
        The paper's PGD-A: examples taken in turn count in the step and examples taken for
        their priority renew it. The ``stochastic`` rule is always aggressive.
    gate : float
        ``stochastic`` draws by priority only while priorities reduce the second moment of the
        gradient by this factor, as measured on batches that come in with their gradient norms
        (see :class:`~flwr_hetero.pgd.sampler.PriorityShuffle`); 0 takes the gate away.

    Raises
    ------
    ValueError
        If an argument is out of its range.

    Notes
    -----
    ``stochastic`` is the default because the rules of the paper lose to uniform sampling in all
    our trials (``benchmarks/pgd``), at equal work and more so in time: the mean gradient of the
    top examples is biased and too long. The square root is the exponent of least variance among
    1, 1/2 and 0 there, and the last computed priorities serve better than extrapolated ones.
    Independent draws by the same probabilities lose what reshuffling gains: they end above
    uniform sampling where every example must be seen.

    References
    ----------
    .. [1] Zhou and Gao, "Distributed Framework for Accelerating Training of Deep Learning
       Models through Prioritization", sections III and IV.

    Examples
    --------
    >>> sampler = PGDSampler(4, 2, seed=0, rule="topk")
    >>> sampler.update(np.arange(4), np.array([5.0, -1.0, 0.2, 0.1]))
    >>> indices, weights = sampler.next_batch()
    >>> int(indices[1]), weights.tolist()
    (0, [1.0, 1.0])
    """

    learns_from = "priority"

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        rule: str = "stochastic",
        renewal_share: float = 0.5,
        smoothing: float = 0.8,
        aggressive: bool = True,
        gate: float = 1.5,
    ) -> None:
        super().__init__(num_samples, batch_size, seed=seed)
        if rule not in RULES:
            raise invalid("rule", rule, f"be one of {RULES}", "stochastic is the default")
        if not 0.0 < renewal_share <= 1.0:
            cure = "priorities must be renewed: 0.5 is the paper's choice"
            raise invalid("renewal_share", renewal_share, "lie in (0, 1]", cure)
        if not 0.0 <= smoothing <= 1.0:
            raise invalid("smoothing", smoothing, "lie in [0, 1]", "the paper takes 0.8")
        if rule == "stochastic" and not aggressive:
            cure = "take rule='topk' for the paper's basic variant"
            raise invalid("aggressive", aggressive, "be True with rule='stochastic'", cure)
        self.rule, self.renewal_share, self.aggressive = rule, float(renewal_share), aggressive
        self.draw: PriorityShuffle | TopPriority
        if rule == "stochastic":
            self.draw = PriorityShuffle(
                num_samples, batch_size, seed=seed, mixing=renewal_share, gate=gate
            )
        else:
            self.draw = TopPriority(
                num_samples,
                batch_size,
                seed=seed,
                num_renewed=max(1, round(renewal_share * min(self.batch_size, self.num_samples))),
                smoothing=smoothing,
                aggressive=aggressive,
                normalised=rule == "topk-normalised",
            )

    @classmethod
    def from_ratios(
        cls, num_samples: int, top_ratio: float, renewal_ratio: float, **options: Any
    ) -> Self:
        """Build from the paper's k and r, which are shares of the data.

        Parameters
        ----------
        num_samples : int
            Size N of the local data set.
        top_ratio, renewal_ratio : float
            k in [0, 1) and r in (0, 1], at most 1 together; the paper takes 0.01 and 0.01.
        **options
            ``seed``, ``rule`` and the others of the constructor.

        Returns
        -------
        PGDSampler
            With ``batch_size`` about ``(k + r) N``.

        Raises
        ------
        ValueError
            If a ratio is out of range or they add up to more than 1.

        Examples
        --------
        >>> sampler = PGDSampler.from_ratios(1000, top_ratio=0.01, renewal_ratio=0.03)
        >>> sampler.batch_size, sampler.renewal_share
        (40, 0.75)
        """
        num_top, num_renewed = batch_parts(num_samples, top_ratio, renewal_ratio)
        batch_size = num_top + num_renewed
        return cls(num_samples, batch_size, renewal_share=num_renewed / batch_size, **options)

    @property
    def is_open(self) -> bool:
        """Whether batches are drawn by priority; always, but for a closed gate."""
        return not isinstance(self.draw, PriorityShuffle) or self.draw.is_open

    def next_batch(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Draw the next batch with its weights; see the class for how."""
        return self.draw.next_batch()

    def update(
        self,
        indices: NDArray[np.int64],
        scores: NDArray[np.float64],
        norms: NDArray[np.float64] | None = None,
    ) -> None:
        r"""Learn the priorities of processed examples.

        Parameters
        ----------
        indices : ndarray of int64, shape (batch,)
            As returned by ``next_batch``; or all examples, for the paper's initial pass.
        scores : ndarray of float64, shape (batch,)
            Their signed priorities.
        norms : ndarray of float64, shape (batch,), optional
            Their gradient norms up to a common factor, for the gate of ``stochastic``, which
            else takes :math:`\sqrt{|p|}` for them. The other rules pass over them.

        Raises
        ------
        ValueError
            If shapes differ, an index is out of range or a priority is not finite; the sampler
            is then unchanged.
        """
        priority = np.asarray(scores, dtype=np.float64)
        if isinstance(self.draw, PriorityShuffle):
            self.draw.update(indices, np.sqrt(np.abs(priority)), norms)
        else:
            self.draw.update(indices, priority)

    def summary(self) -> dict[str, float]:
        """Describe the sampling in a few figures, see the summaries of the rules' classes."""
        return self.draw.summary()

    def state_dict(self) -> StateDict:
        """Return all that is needed to continue; about 25 bytes a sample."""
        return self.draw.state_dict() | {"rule": self.rule}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken.

        Raises
        ------
        ValueError
            If the state is damaged or belongs to other data or another rule; the sampler is
            then unchanged.
        """
        if state.get("rule") != self.rule:
            raise ValueError(
                f"sampler state has rule={state.get('rule')!r}, this sampler has {self.rule!r}: "
                "start afresh."
            )
        self.draw.load_state_dict(state)

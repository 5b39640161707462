"""The draw of PGD's paper: some examples in turn, others for their estimated priority."""

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.core.priority import pick_top, top_scale
from flwr_hetero.core.priority_trend import Trend, estimate, learn, start_trend
from flwr_hetero.sampler.batches import BatchSampler, StateDict

MEMORY = 0.9
"""Share of the past in the running mean priorities of the two parts of a batch."""


class TopPriority(BatchSampler):
    """Algorithm 1: a batch holds the next examples in turn and those of highest priority.

    Used through :class:`~flwr_hetero.sampler.PGDSampler`, which checks the arguments.

    Parameters
    ----------
    num_samples, batch_size, seed
        As for every sampler; the seed shuffles the turn.
    num_renewed : int
        Examples of a batch taken in turn, in ``range(1, batch_size + 1)``.
    smoothing : float
        Algorithm 2's lambda.
    aggressive : bool
        Whether the examples taken in turn count in the step and those taken for their
        priority renew it.
    normalised : bool
        Whether the top part's weight is shortened, see
        :func:`~flwr_hetero.core.priority.top_scale`.

    Notes
    -----
    Until every example had its turn or a priority, whole batches are taken in turn: the
    paper's initial pass over the data, amortised. Giving ``update`` the priorities of all
    examples before the first batch is the paper's own initial pass. Examples taken in turn
    are not taken for their priority a second time in the same batch.

    Examples
    --------
    >>> sampler = TopPriority(5, 2, seed=0, num_renewed=1)
    >>> sampler.update(np.arange(5), np.array([1.0, 9.0, 2.0, 7.0, 3.0]))
    >>> batches = [sampler.next_batch()[0].tolist() for _ in range(5)]
    >>> sorted(batch[0] for batch in batches), sorted({batch[1] for batch in batches})
    ([0, 1, 2, 3, 4], [1, 3])
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
            self.progress = MEMORY * past + (1 - MEMORY) * means
        if not self.aggressive:
            index, priority = index[~top], priority[~top]
        rows = learn(self.trend.rows(index), priority, self.iteration, self.smoothing)
        self.trend.put(index, rows)
        self.drawn_top[index] = False
        self.iteration += 1

    def summary(self) -> dict[str, float]:
        """Describe the priorities in a few figures.

        Returns
        -------
        dict of str to float
            ``coverage`` (share ever computed), ``negative-share`` (of those), ``mean-age``
            (iterations since the computation) and ``top-scale`` (weight of the top part).
        """
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
            vectors = {name: np.asarray(state[name]) for name in _VECTORS}
            progress = np.array(state["progress"], dtype=np.float64)
            turns, iteration = int(state["turns"]), int(state["iteration"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"sampler state is damaged ({error!r}): start afresh.") from error
        if any(
            v.shape != (self.num_samples,) or v.dtype.kind != _VECTORS[n]
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


_VECTORS = {"order": "i", "priority": "f", "slope": "f", "computed_at": "i", "drawn_top": "b"}

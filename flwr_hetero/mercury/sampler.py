"""Mercury's sampler: batches by importance, with weights that keep the gradient unbiased."""

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero.client.gate import LARGEST, check_importance
from flwr_hetero.errors import invalid
from flwr_hetero.mercury.algorithm import (
    Groups,
    advance,
    check_groups,
    draw_batch,
    error_chance,
    make_groups,
    resize,
)
from flwr_hetero.mercury.importance_cache import FlatImportance
from flwr_hetero.state_dict import StateDict

ESTIMATORS = ("flat", "cycle", "paper")


SCORES = ("importance", "loss")


class MercurySampler(UniformSampler):
    r"""Importance sampling whose weighted mean gradient stays unbiased.

    Each example's latest score is cached. :meth:`refresh_indices` names the group to score
    next, round-robin; the scores of the training batch itself are as welcome (*free*
    importance, no extra pass). Samples never scored count as average.

    Parameters
    ----------
    num_samples : int
        Size N of the local data set.
    batch_size : int
        Examples per batch.
    seed : int, keyword-only
        Seed of the sampler's own random generator.
    num_groups : int, optional
        Groups D of the round-robin; the smaller of 16 and N if left out.
    estimator : {"flat", "cycle", "paper"}
        How a batch is drawn and weighted:

        - ``flat``: over all samples, :math:`q = (1-\lambda) I / \sum I + \lambda / N`,
          weight :math:`1 / (N q)`. Unbiased at every step, however old the cache.
        - ``cycle``: the paper's two levels with repaired weights. Unbiased over a refresh
          cycle if the same number of batches is drawn after every refresh.
        - ``paper``: the paper's two levels and weights to the letter. Biased.
    mixing : float
        Share :math:`\lambda` of uniform draws in (0, 1]; no weight of ``flat`` exceeds
        :math:`1/\lambda`. ``paper`` does without.
    gate : float
        ``flat`` draws by importance only while the second moment of the gradient is this many
        times smaller than with uniform draws, as measured on the scores that come in, and
        reshuffles uniformly otherwise. 0 takes the gate away.
    scores : {"importance", "loss"}
        What :meth:`update` is given: importance to be used as it is, or cross-entropy losses,
        from which the chance of a wrong answer is taken as importance.
    beta : float
        Preference of the two-level draws for fresh groups (Eq. 6).
    groups_per_batch : int, optional
        Groups d in a two-level batch; the smaller of 4, D and the batch size if left out.

    Raises
    ------
    ValueError
        If an argument is out of its range.

    Notes
    -----
    On large data batches are drawn some at a time, and their scores are taken in some at a time
    (:class:`~flwr_hetero.mercury.importance_cache.Stride`): at most 32, and at most 1/8 of an
    epoch. Scores of a group take effect at once.

    The gate takes importance for gradient norms. ``scores="loss"`` and ``upper`` scores
    (:func:`flwr_hetero.client.sampled_loss.importance`) follow them; plain losses as importance,
    the paper's choice, overstate the gain.

    References
    ----------
    .. [1] Zeng et al., "Mercury: Efficient On-Device Distributed DNN Training via Stochastic
       Importance Sampling", SenSys 2021.

    Examples
    --------
    >>> sampler = MercurySampler(4, 8, seed=0, gate=0, num_groups=2)
    >>> sampler.update(np.arange(4), np.array([6.0, 2.0, 0.0, 0.0]))
    >>> indices, weights = sampler.next_batch()
    >>> dict(sorted(zip(indices.tolist(), weights.tolist())))
    {0: 0.5, 1: 1.0, 2: 2.0, 3: 2.0}
    >>> group = sampler.refresh_indices()  # score these, then: sampler.update(group, scores)
    >>> len(group)
    2
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        num_groups: int | None = None,
        estimator: str = "flat",
        mixing: float = 0.5,
        gate: float = 1.2,
        scores: str = "importance",
        beta: float = 1.0,
        groups_per_batch: int | None = None,
    ) -> None:
        super().__init__(num_samples, batch_size, seed=seed)
        if estimator not in ESTIMATORS:
            raise invalid("estimator", estimator, f"be one of {ESTIMATORS}", "flat is the default")
        if scores not in SCORES:
            raise invalid("scores", scores, f"be one of {SCORES}", "say what update is given")
        if not 0.0 < mixing <= 1.0:
            raise invalid("mixing", mixing, "lie in (0, 1]", "0.5 is a safe start")
        for name, value in (("gate", gate), ("beta", beta)):
            if not (np.isfinite(value) and value >= 0.0):
                raise invalid(name, value, "be at least 0 and finite", "0 takes its effect away")
        wanted = min(16, self.num_samples) if num_groups is None else num_groups
        self.groups = make_groups(self.num_samples, wanted, self.rng)
        most = min(wanted, self.batch_size)
        chosen = min(4, most) if groups_per_batch is None else groups_per_batch
        if not 1 <= chosen <= most:
            rule = f"lie between 1 and {most} (groups, and examples per batch)"
            raise invalid("groups_per_batch", chosen, rule, "leave it out")
        self.estimator, self.scores = estimator, scores
        self.learns_from = scores
        self.beta, self.groups_per_batch = float(beta), int(chosen)
        self.flat = FlatImportance(self.num_samples, self.batch_size, float(mixing), float(gate))
        self.steps, self.awaits_group = 0, False
        self._given: NDArray[np.int64] | None = None

    # --- drawing ---------------------------------------------------------------------

    def next_batch(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Draw the next batch with its weights; see the class for how."""
        self.steps += 1
        if self.estimator == "flat":
            batch = self.flat.next(self.rng, self.steps) or super().next_batch()
        else:
            batch = self._draw_two_level(repaired=self.estimator == "cycle")
        self._given = batch[0]
        return batch

    def _draw_two_level(self, repaired: bool) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        self.flat.take_in(self.steps)
        return draw_batch(
            self.flat.cache.values,
            self.groups,
            batch_size=self.batch_size,
            num_chosen=min(self.groups_per_batch, len(self.groups.sizes)),
            beta=self.beta,
            mixing=self.flat.mixing if repaired else 0.0,
            per_cycle=repaired,
            rng=self.rng,
        )

    # --- learning --------------------------------------------------------------------

    def refresh_indices(self) -> NDArray[np.int64]:
        """Name the group to score next and pass the turn on.

        Returns
        -------
        ndarray of int64, shape (group size,)
            To be scored by the current model and handed to :meth:`update`, as far as time
            allows.
        """
        group = self.groups.members(self.groups.turn).copy()
        self.groups, self.awaits_group = advance(self.groups), True
        return group

    def resize_groups(self, size: int) -> None:
        """Cut the coming groups to another size, for instance to what the link hides (BACC).

        Parameters
        ----------
        size : int
            Samples per group, at least 1.
        """
        self.groups = resize(self.groups, size)

    def update(self, indices: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """Cache new scores, of a refreshed group or of the batch just trained on.

        Parameters
        ----------
        indices : ndarray of int64, shape (b,)
            Scored samples; an index may stand twice.
        scores : ndarray of float64, shape (b,)
            Their importance or losses, finite and not negative.

        Raises
        ------
        ValueError
            If the arguments are unusable; the sampler is then unchanged.
        """
        index, score = np.asarray(indices, np.int64), np.asarray(scores, np.float64)
        if not self._is_usable(index, score):
            check_importance(self.check_scores(index, score)[1])
        if self.scores == "loss":
            score = error_chance(score)
        if self._is_batch(index):
            self.flat.hear(index, score, self.steps)
        else:
            self.flat.learn(index, score, self.steps)
            self.awaits_group = False

    def _is_usable(self, indices: NDArray[np.int64], scores: NDArray[np.float64]) -> bool:
        """Check at little cost what is nearly always so; what is wrong is found out later."""
        if indices.ndim != 1 or indices.shape != scores.shape or not indices.size:
            return False
        known = indices is self._given
        inside = known or (indices.min() >= 0 and indices.max() < self.num_samples)
        return bool(inside and scores.min() >= 0.0 and scores.max() < LARGEST)

    def _is_batch(self, indices: NDArray[np.int64]) -> bool:
        """Whether these may be a batch of ours, and not a group or a pass over all."""
        if len(indices) > self.batch_size:
            return False
        if not self.awaits_group:
            return True
        last = self.groups.members(self.groups.turn - 1)[: len(indices)]
        return not np.array_equal(indices, last)

    def forget(self, indices: NDArray[np.int64]) -> None:
        """Treat some samples as never scored, because other samples took their place.

        Parameters
        ----------
        indices : ndarray of int64, shape (b,)
            Positions in the local data set.
        """
        self.flat.forget(indices, self.steps)

    # --- reporting and resuming ------------------------------------------------------

    def summary(self) -> dict[str, float]:
        """Describe the state of the sampling in a few figures, for the history and its plots.

        Returns
        -------
        dict of str to float
            See :meth:`flwr_hetero.mercury.importance_cache.FlatImportance.summary`.
        """
        return self.flat.summary(self.steps)

    def state_dict(self) -> StateDict:
        """Return sizes, generator, cache with ages, groups and evidence: 24 bytes a sample."""
        order, bounds, turn, size = self.groups
        return (
            super().state_dict()
            | self.flat.state()
            | {
                "estimator": self.estimator,
                "group_order": order.astype(np.int32),
                "group_bounds": bounds,
                "group_turn": turn,
                "group_size": size,
                "awaits_group": self.awaits_group,
                "steps": self.steps,
            }
        )

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken.

        Raises
        ------
        ValueError
            If the state is damaged, incomplete or of other data; the sampler is unchanged.
        """
        if state.get("estimator") != self.estimator:
            raise ValueError("sampler state belongs to another estimator: start afresh.")
        flat = self.flat.restored(state)
        try:
            groups = Groups(
                np.asarray(state["group_order"], dtype=np.int64),
                np.asarray(state["group_bounds"], dtype=np.int64),
                int(state["group_turn"]),
                int(state["group_size"]),
            )
            awaits_group, steps = bool(int(state["awaits_group"])), int(state["steps"])
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"sampler state is incomplete ({error}): start afresh.") from error
        check_groups(groups, self.num_samples)
        if steps < 0:
            raise ValueError("sampler state holds impossible figures: start afresh.")
        super().load_state_dict(state)
        self.flat, self.groups, self.steps = flat, groups, steps
        self.awaits_group = awaits_group

"""PGD's sampler: batches by priority, to the paper's letter or with unbiased weights."""

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.core.errors import invalid
from flwr_hetero.core.priority import batch_parts
from flwr_hetero.sampler.batches import BatchSampler, StateDict
from flwr_hetero.sampler.pgd_shuffle import PriorityShuffle
from flwr_hetero.sampler.top_priority import TopPriority

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
        (see :class:`~flwr_hetero.sampler.pgd_shuffle.PriorityShuffle`); 0 takes the gate away.

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

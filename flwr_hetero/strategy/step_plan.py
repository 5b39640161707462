"""Who takes how many steps: the settings of a step budget and what follows from them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.core.errors import invalid
from flwr_hetero.core.local_steps import check_bounds, deadline_steps, gamma_steps
from flwr_hetero.core.step_time import fast_class
from flwr_hetero.strategy.speeds import Speeds

BUDGETS = ("two-class", "deadline")


class Budget(TypedDict, total=False):
    """Keyword arguments of :class:`StepPlan`, to be handed through."""

    budget: str
    gamma: float | Mapping[str, float] | None
    deadline_s: float | None
    min_steps: int
    max_steps: int | None


@dataclass(frozen=True)
class StepPlan:
    r"""The settings of :math:`\tau_i = \gamma_i \tau_F`.

    Parameters
    ----------
    fast_steps : int
        Steps tau_F of a fast node per round.
    budget : {"two-class", "deadline"}
        The paper's two classes, tau_F and tau_S = gamma tau_F, or the steps that each node can
        take until a deadline, its link's transfer time taken off.
    gamma : float or mapping of str to float, optional
        Performance gap ratio in (0, 1] of the slow class, or of each node by its identity.
        None: measured from the replies' times. 1 is balanced local SGD.
    deadline_s : float, optional
        For "deadline": length of a round in seconds. None: the time in which the quickest
        node takes ``fast_steps``.
    min_steps, max_steps : int
        Bounds for every node; ``max_steps`` is ``fast_steps`` if left out. Whoever lies about
        its speed gets no more than that.

    Raises
    ------
    ValueError
        If a setting is out of range or does not go with the kind of budget.

    Examples
    --------
    >>> plan = StepPlan(fast_steps=32, gamma={"gpu": 1.0, "cpu": 1 / 22})
    >>> nodes, speeds = ["gpu", "cpu"], Speeds(smoothing=0.5)
    >>> plan.steps_for(nodes, speeds).tolist(), plan.fast_nodes(nodes, speeds).tolist()
    ([32, 1], [True, False])
    """

    fast_steps: int = 32
    budget: str = "two-class"
    gamma: float | Mapping[str, float] | None = None
    deadline_s: float | None = None
    min_steps: int = 1
    max_steps: int | None = None

    def __post_init__(self) -> None:
        check_bounds(self.fast_steps, self.min_steps, self.max_steps)
        if self.budget not in BUDGETS:
            raise invalid("budget", self.budget, f"be one of {BUDGETS}", "choose one")
        self._check_deadline()
        for value in self._given_gammas():
            if not isinstance(value, (int, float, np.number)) or not 0 < value <= 1:
                raise invalid("gamma", value, "lie in (0, 1]", "it is fast time over slow time")

    def _check_deadline(self) -> None:
        by_deadline = self.budget == "deadline"
        if self.gamma is not None and by_deadline:
            raise invalid("gamma", self.gamma, "be left out with a deadline", "it is in seconds")
        if self.deadline_s is not None and not (by_deadline and 0 < self.deadline_s < math.inf):
            rule = "be positive, finite and with budget='deadline'"
            raise invalid("deadline_s", self.deadline_s, rule, "pass seconds, or leave it out")

    def _given_gammas(self) -> list[float]:
        if isinstance(self.gamma, Mapping):
            return list(self.gamma.values())
        return [] if self.gamma is None else [self.gamma]

    def steps_for(self, nodes: Sequence[str], speeds: Speeds) -> NDArray[np.int64]:
        """Decide how many steps each node takes.

        Parameters
        ----------
        nodes : sequence of str
            Stable identities.
        speeds : Speeds
            What is known of the fleet.

        Returns
        -------
        ndarray of int64, shape (num_nodes,)
            tau_i; ``min_steps`` for a node of which nothing is known.
        """
        low, high = self.min_steps, self.max_steps or self.fast_steps
        if self.budget == "two-class":
            gammas = self._gammas(nodes, speeds)
            return gamma_steps(gammas, self.fast_steps, min_steps=low, max_steps=high)
        deadline_s = self.deadline_s or speeds.shortest_round_s(self.fast_steps)
        if deadline_s is None:
            return np.full(len(nodes), low, np.int64)
        step_s, link_s = speeds.step_times_s(nodes), speeds.link_times_s(nodes)
        return deadline_steps(deadline_s, step_s, link_s, min_steps=low, max_steps=high)

    def _gammas(self, nodes: Sequence[str], speeds: Speeds) -> NDArray[np.float64]:
        if isinstance(self.gamma, Mapping):
            return np.array([self.gamma.get(node, math.nan) for node in nodes], np.float64)
        if self.gamma == 1:
            return np.ones(len(nodes))
        slow = speeds.gamma() if self.gamma is None else self.gamma
        gammas = np.where(speeds.fast(nodes), 1.0, slow)
        gammas[np.isnan(speeds.step_times_s(nodes))] = math.nan
        return gammas

    def fast_nodes(self, nodes: Sequence[str], speeds: Speeds) -> NDArray[np.bool_]:
        """Tell which nodes are of the fast class.

        Parameters
        ----------
        nodes : sequence of str
            Stable identities.
        speeds : Speeds
            What is known of the fleet.

        Returns
        -------
        ndarray of bool, shape (num_nodes,)
            By the given gammas, else by the measured times; unknown nodes are slow.
        """
        if not isinstance(self.gamma, Mapping):
            return speeds.fast(nodes)
        known = list(self.gamma)
        classes = fast_class([1 / self.gamma[node] for node in known])
        fast = {node for node, is_fast in zip(known, classes, strict=True) if is_fast}
        return np.array([node in fast for node in nodes], dtype=bool)

"""Nodes that keep failing are not asked again until the next profiling."""

from collections.abc import Iterable, Set
from logging import WARNING

from flwr.common.logger import log


class Probation:
    """Count each node's failures in a row.

    Parameters
    ----------
    max_failures : int
        Failures in a row from which on a node is barred.

    Attributes
    ----------
    strikes : dict of str to int
        Identity to failures in a row.

    Examples
    --------
    >>> probation = Probation(max_failures=2)
    >>> for _ in range(2):
    ...     probation.observe(failed=["node-1"], good=["node-2"])
    >>> probation.barred
    {'node-1'}
    """

    def __init__(self, max_failures: int) -> None:
        self.max_failures = max_failures
        self.strikes: dict[str, int] = {}
        self._judged: Set[str] = frozenset()

    @property
    def barred(self) -> set[str]:
        """Identities that are not to be asked."""
        return {name for name, count in self.strikes.items() if count >= self.max_failures}

    def observe(self, failed: Iterable[str], good: Iterable[str]) -> None:
        """Take in the outcome of a round.

        Parameters
        ----------
        failed, good : iterable of str
            Identities of nodes whose reply did not count, and of those whose did.
        """
        for name in failed:
            self.strikes[name] = self.strikes.get(name, 0) + 1
            if self.strikes[name] == self.max_failures:
                log(
                    WARNING,
                    "%s failed %d times in a row and is not asked again until the next profiling",
                    name,
                    self.max_failures,
                )
        for name in good:
            self.strikes.pop(name, None)

    def judge_training(self, dropped: Iterable[str], answered: Set[str]) -> bool:
        """Take in who trained in a round.

        Parameters
        ----------
        dropped : iterable of str
            Identities of nodes whose reply did not count, those dropped late among them.
        answered : set of str
            Identities of nodes whose reply seemed good at first.

        Returns
        -------
        bool
            Whether any reply counted.
        """
        failed = set(dropped)
        good = answered - failed
        self.observe(sorted(failed), sorted(good))
        self._judged = failed | good
        return bool(good)

    def judge_evaluation(self, dropped: Iterable[str]) -> None:
        """Take in who failed to evaluate; a node that was asked to train is judged by that.

        Parameters
        ----------
        dropped : iterable of str
            Identities of nodes whose reply did not count.
        """
        self.observe(sorted(set(dropped) - self._judged), good=[])

    def clear(self) -> None:
        """Give every node a fresh start."""
        self.strikes.clear()

"""Nodes that keep failing."""

from collections.abc import Set
from logging import WARNING

from flwr_hetero._flwr import log


class FailureCounter:
    """Count the failures of each node in a row; too many, and it is blocked until profiled again.

    A node that trained in a round is judged by that, and not by its evaluation.
    """

    def __init__(self, max_failures: int) -> None:
        self.max_failures = max_failures
        self.failures: dict[str, int] = {}
        self._trained: Set[str] = frozenset()

    @property
    def blocked(self) -> set[str]:
        """Identities that are not asked."""
        return {name for name, count in self.failures.items() if count >= self.max_failures}

    def record_training(self, good: Set[str], failed: Set[str]) -> None:
        """Count the outcome of training; success begins the row again."""
        self._add(failed)
        for name in good:
            self.failures.pop(name, None)
        self._trained = good | failed

    def record_evaluation(self, failed: Set[str]) -> None:
        """Count failures of nodes that only evaluated."""
        self._add(failed - self._trained)

    def record_late(self, failed: Set[str]) -> None:
        """Count failures of nodes that no round waits for."""
        self._add(failed)

    def clear(self) -> None:
        """Forget all failures."""
        self.failures.clear()

    def _add(self, failed: Set[str]) -> None:
        for name in sorted(failed):
            self.failures[name] = self.failures.get(name, 0) + 1
            if self.failures[name] == self.max_failures:
                text = "%s failed %d times in a row and is not asked until the next profiling"
                log(WARNING, text, name, self.max_failures)

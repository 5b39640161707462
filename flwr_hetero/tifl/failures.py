"""Nodes that keep failing."""

import json
from collections.abc import Set
from logging import WARNING
from typing import ClassVar

from flwr_hetero._flwr import log
from flwr_hetero.state_dict import StateDict


class FailureCounter:
    """Count the failures of each node in a row; too many, and it is blocked for some rounds.

    A node that trained in a round is judged by that, and not by its evaluation. Failures to train
    and to evaluate are rows of their own; a node that has trained begins both again.
    """

    STATE: ClassVar = {"failures": str, "failures_to_evaluate": str}

    def __init__(self, max_failures: int) -> None:
        self.max_failures = max_failures
        self.failures: dict[str, int] = {}
        self.evaluation: dict[str, int] = {}
        self._told: set[str] = set()
        self._trained: Set[str] = frozenset()

    @property
    def blocked(self) -> set[str]:
        """Identities that are not asked."""
        rows = (self.failures, self.evaluation)
        return {name for row in rows for name, n in row.items() if n >= self.max_failures}

    def record_training(self, good: Set[str], failed: Set[str]) -> None:
        """Count the outcome of training; success begins both rows again."""
        self._add(self.failures, failed)
        for name in good:
            self.failures.pop(name, None)
            self.evaluation.pop(name, None)
        self._trained = good | failed

    def record_evaluation(self, good: Set[str], failed: Set[str]) -> None:
        """Count the outcome of nodes that only evaluated; success begins that row again."""
        self._add(self.evaluation, failed - self._trained)
        for name in good:
            self.evaluation.pop(name, None)

    def record_late(self, failed: Set[str]) -> None:
        """Count failures of nodes that no round waits for."""
        self._add(self.failures, failed)

    def try_again(self) -> None:
        """Let blocked nodes try once more: another failure blocks them again."""
        for row in (self.failures, self.evaluation):
            row.update({name: min(n, self.max_failures - 1) for name, n in row.items()})

    def clear(self) -> None:
        """Forget all failures."""
        self.failures.clear()
        self.evaluation.clear()

    def state_dict(self) -> StateDict:
        """Return both rows."""
        return {
            "failures": json.dumps(self.failures),
            "failures_to_evaluate": json.dumps(self.evaluation),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        self.failures = json.loads(str(state["failures"]))
        self.evaluation = json.loads(str(state["failures_to_evaluate"]))

    def _add(self, row: dict[str, int], failed: Set[str]) -> None:
        for name in sorted(failed):
            row[name] = row.get(name, 0) + 1
            if row[name] == self.max_failures and name not in self._told:
                text = "%s failed %d times in a row and is left out (profile_interval: until when)"
                log(WARNING, text, name, self.max_failures)
                self._told.add(name)

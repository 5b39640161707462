"""Settings of this app, and the strategy of each algorithm."""

from dataclasses import dataclass
from typing import Any

from flwr.serverapp.strategy import Strategy

from flwr_hetero.errors import invalid
from flwr_hetero.strategy import BiasedLocalSGD, FedNova, Wrapper
from flwr_hetero_studies.tasks import Examples, load_partition
from flwr_hetero_studies.tasks.run import INNER, inner_strategy
from flwr_hetero_studies.tasks.settings import Settings

BIASES = {
    "biased": (True, True),
    "weights-bias": (True, False),
    "sampling-bias": (False, True),
    "unbalanced": (False, False),
    "balanced": (False, False),
    "sync-sgd": (False, False),
}
"""Algorithm to whether models are weighted by steps, and whether fast nodes sample by loss."""

FEDNOVA = "fednova"


@dataclass(frozen=True)
class BiasedSettings(Settings):
    """The run-config of ``apps/biased-local-sgd``; see its pyproject.toml."""

    algorithm: str = "biased"
    fast_steps: int = 32
    budget: str = "two-class"
    gamma: float = 0.0
    deadline_s: float = 0.0
    high_loss_fraction: float = 0.5
    share: float = 0.0
    shared_data: bool = False
    unified: bool = False
    inner: str = "fedavg"
    partition: str = "iid"
    fleet: str = "gpu-cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("inner", INNER)
        self.check_choice("algorithm", (*BIASES, FEDNOVA))
        if self.shared_data and self.algorithm == FEDNOVA:
            rule = "be false with fednova, whose nodes have data of their own"
            raise invalid("shared-data", True, rule, "choose another algorithm")
        self._strategy(1 if self.shared_data else None)  # refuses what it cannot take

    def strategy(self) -> Wrapper:
        """Make the strategy of the algorithm."""
        return self._strategy(len(all_examples(self)) if self.shared_data else None)

    def _strategy(self, shared_samples: int | None) -> Wrapper:
        if self.algorithm == FEDNOVA:
            return FedNova(self._inner(), self.fast_steps, **self._budget())
        weights, sampling = BIASES[self.algorithm]
        steps = 1 if self.algorithm == "sync-sgd" else self.fast_steps
        return BiasedLocalSGD(
            self._inner(),
            steps,
            weigh_by_steps=weights,
            step_correction=0.0,
            high_loss_fraction=self.high_loss_fraction if sampling else None,
            share=self.share or None,
            shared_samples=shared_samples,
            batch_size=self.batch_size,
            unified=self.unified,
            seed=self.seed,
            **self._budget(),
        )

    def _inner(self) -> Strategy:
        return inner_strategy(self.inner, self)

    def _budget(self) -> dict[str, Any]:
        if self.algorithm in ("balanced", "sync-sgd"):
            return {"gamma": 1.0}
        return {
            "budget": self.budget,
            "gamma": self.gamma or None,
            "deadline_s": self.deadline_s or None,
        }


def all_examples(settings: Settings) -> Examples:
    """Load the data set that all nodes see in shared-data mode."""
    return load_partition(settings.dataset, 0, 1, task=settings.task, seed=settings.seed)

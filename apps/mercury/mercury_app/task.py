"""Settings of this app, and the strategy that they describe."""

from dataclasses import dataclass

from flwr.serverapp.strategy import FedAvg, Strategy

from flwr_hetero.errors import check_count, check_number, invalid
from flwr_hetero.mercury.sampler import ESTIMATORS
from flwr_hetero.strategy import Resharding, SamplerMetrics
from flwr_hetero_studies.rivals import AdaComm
from flwr_hetero_studies.tasks.settings import Settings

SAMPLING = ("bacc", "free", "uniform")
COMMUNICATION = ("fixed", "adacomm")
RESHARDING = ("off", "importance", "random")


@dataclass(frozen=True)
class MercurySettings(Settings):
    """The run-config of ``apps/mercury``; see its pyproject.toml."""

    sampling: str = "bacc"
    estimator: str = "flat"
    local_steps: int = 5
    communication: str = "fixed"
    adapt_every_s: float = 10.0
    resharding: str = "off"
    reshard_share: float = 0.2
    reshard_budget: int = 100_000
    alpha: float = 1.0
    fleet: str = "wifi-10"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("sampling", SAMPLING)
        self.check_choice("estimator", ESTIMATORS)
        self.check_choice("communication", COMMUNICATION)
        self.check_choice("resharding", RESHARDING)
        if self.resharding == "importance" and self.sampling == "uniform":
            rule = "go with a sampling that finds out importance"
            raise invalid("resharding", self.resharding, rule, "use random with uniform sampling")
        check_count("local-steps", self.local_steps)
        check_number("adapt-every-s", self.adapt_every_s, "[0, inf)")
        check_number("reshard-share", self.reshard_share, "(0, 1]")
        check_count("reshard-budget", self.reshard_budget, 1)

    def strategy(self) -> Strategy:
        """Make FedAvg, with AdaComm and resharding around it where they are asked for."""
        strategy: Strategy = FedAvg(fraction_evaluate=0.0)
        if self.communication == "adacomm":
            strategy = AdaComm(strategy, max(self.local_steps, 1), interval_s=self.adapt_every_s)
        if self.resharding != "off":
            if not isinstance(self.shape[1], int):
                hint = "only examples with a label can be exchanged"
                raise invalid("resharding", self.resharding, "be off with this task", hint)
            strategy = Resharding(
                strategy,
                share=self.reshard_share,
                budget_bytes=self.reshard_budget,
                by_importance=self.resharding == "importance",
                seed=self.seed,
            )
        return strategy if self.sampling == "uniform" else SamplerMetrics(strategy)

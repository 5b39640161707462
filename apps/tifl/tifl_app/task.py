"""Settings of this app, beside those that all apps share."""

from dataclasses import dataclass

from flwr.serverapp.strategy import (
    FedAdam,
    FedAvg,
    FedAvgM,
    FedProx,
    FedTrimmedAvg,
    Strategy,
)

from flwr_hetero.errors import invalid
from flwr_hetero.task.settings import Settings

PARALLEL = "parallel"
"""The policy by which all tiers train at the same time."""
INNER = {
    "fedavg": lambda: FedAvg(fraction_evaluate=0.0),
    "fedadam": lambda: FedAdam(fraction_evaluate=0.0),
    "fedavgm": lambda: FedAvgM(fraction_evaluate=0.0, server_momentum=0.9),
    "fedprox": lambda: FedProx(fraction_evaluate=0.0, proximal_mu=0.1),
    "fedtrimmedavg": lambda: FedTrimmedAvg(fraction_evaluate=0.0),
}
"""The strategy inside TiFL; federated evaluation happens only where TiFL needs it."""


@dataclass(frozen=True)
class TiflSettings(Settings):
    """The run-config of ``apps/tifl``; see its pyproject.toml."""

    policy: str = "adaptive"
    num_tiers: int = 5
    clients_per_round: int = 3
    interval: int = 10
    credits: str = "auto"
    sync_rounds: int = 0
    inner: str = "fedavg"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("inner", INNER)
        if self.policy == PARALLEL:
            self._check_parallel()

    def _check_parallel(self) -> None:
        """Refuse what would have no effect where each tier runs at its own pace."""
        if self.sync_rounds:
            raise invalid("sync-rounds", self.sync_rounds, f"be 0 with policy={PARALLEL!r}")
        if not (self.credits in ("auto", "unlimited") or self.credits.isdigit()):
            rule = f"be auto, unlimited or a number with policy={PARALLEL!r}"
            raise invalid("credits", self.credits, rule)

    @property
    def tier_credits(self) -> int | str | None:
        """The credits as :class:`~flwr_hetero.strategy.TiFL` wants them."""
        if self.credits == "unlimited":
            return None
        return int(self.credits) if self.credits.isdigit() else self.credits

    def inner_strategy(self) -> Strategy:
        """Make the strategy inside TiFL."""
        return INNER[self.inner]()

"""Settings of this app, beside those that all apps share."""

from dataclasses import dataclass

from flwr.serverapp.strategy import Strategy

from flwr_hetero.errors import check_count, invalid
from flwr_hetero.strategy import TiFL
from flwr_hetero_studies.tasks.run import INNER, inner_strategy
from flwr_hetero_studies.tasks.settings import Settings

RANDOM = "vanilla"
"""The policy that selects nodes at random."""


@dataclass(frozen=True)
class TiflSettings(Settings):
    """The run-config of ``apps/tifl``; see its pyproject.toml."""

    policy: str = "adaptive"
    num_tiers: int = 5
    clients_per_round: int = 3
    interval: int = 10
    credits: str = "unlimited"
    sync_rounds: int = 0
    inner: str = "fedavg"
    baseline: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("inner", INNER)
        if not (self.credits == "unlimited" or self.credits.isdigit()):
            raise invalid("credits", self.credits, "be 'unlimited' or a whole number in quotes")
        check_count("sync_rounds", self.sync_rounds)
        TiFL(  # refused here, before any node is asked for
            None,
            self.clients_per_round,
            self.num_tiers,
            policy=self.policy,
            interval=self.interval,
            credits=self.tier_credits,
        )

    @property
    def tier_credits(self) -> int | None:
        """The credits as :class:`~flwr_hetero.strategy.TiFL` wants them."""
        return int(self.credits) if self.credits.isdigit() else None

    def inner_strategy(self) -> Strategy:
        """Make the strategy inside TiFL."""
        return inner_strategy(self.inner, self)

"""From a fleet to its tiers: profile, leave out who never answered, group the rest."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from flwr.common.logger import log
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_hetero.core.errors import check_count, invalid
from flwr_hetero.core.tiers import Tiering, histogram_tiers, median_latency, quantile_tiers
from flwr_hetero.strategy.profiling import profile_nodes
from flwr_hetero.strategy.tier_table import TierTable

if TYPE_CHECKING:
    from flwr_hetero.strategy.wrapper import Wrapper

TIERINGS: dict[str, Callable[[NDArray[np.float64], int], Tiering]] = {
    "quantile": quantile_tiers,
    "histogram": histogram_tiers,
}


@dataclass(frozen=True)
class TieringSettings:
    """How tiers are made; see :class:`~flwr_hetero.strategy.TiFL` for the meaning.

    Raises
    ------
    ValueError
        If a setting is unknown or out of range.
    """

    num_tiers: int = 5
    tiering: str = "quantile"
    sync_rounds: int = 3
    warmup_rounds: int = 1
    t_max: float = 600.0
    profile_interval: int | None = None

    def __post_init__(self) -> None:
        check_count("num_tiers", self.num_tiers, 1, "pass the number of groups you want")
        check_count("sync_rounds", self.sync_rounds, 1, "3 is usual")
        check_count("warmup_rounds", self.warmup_rounds, 0, "1 is usual")
        if self.profile_interval is not None:
            check_count("profile_interval", self.profile_interval, 1, "None profiles only once")
        if not (np.isfinite(self.t_max) and self.t_max > 0):
            raise invalid("t_max", self.t_max, "be positive and finite", "pass seconds")
        if self.tiering not in TIERINGS:
            raise invalid("tiering", self.tiering, f"be one of {sorted(TIERINGS)}", "choose one")

    def is_due(self, rounds_since: int) -> bool:
        """Tell whether it is time to profile again.

        Parameters
        ----------
        rounds_since : int
            Rounds since the last profiling.

        Returns
        -------
        bool
            Never without an interval.
        """
        return self.profile_interval is not None and rounds_since >= self.profile_interval


class TieredFleet(NamedTuple):
    """What a profiling found.

    Parameters
    ----------
    table : TierTable
        Who is in which tier.
    tiering : Tiering
        The same by position, in the table's order.
    rounds : ndarray of float64, shape (sync_rounds, num_nodes)
        Latency in seconds; NaN where a node did not answer.
    """

    table: TierTable
    tiering: Tiering
    rounds: NDArray[np.float64]


def tier_fleet(
    strategy: "Wrapper",
    grid: Grid,
    online: Collection[int],
    server_round: int,
    settings: TieringSettings,
) -> TieredFleet | None:
    """Profile the nodes that are there and group them by latency.

    Parameters
    ----------
    strategy : Wrapper
        Whose session counts the time and the failures.
    grid : Grid
        The fleet.
    online : collection of int
        Node ids to profile.
    server_round : int
        Current round.
    settings : TieringSettings
        Checked settings.

    Returns
    -------
    TieredFleet or None
        In order of the nodes' identities; None if nobody answered in time.
    """
    roster = strategy.session.roster
    roster.learn(grid)
    measured = profile_nodes(
        strategy,
        grid,
        sorted(online),
        server_round=server_round,
        sync_rounds=settings.sync_rounds,
        warmup_rounds=settings.warmup_rounds,
        t_max=settings.t_max,
    )
    column = sorted(range(len(online)), key=lambda i: roster.sort_key(measured.node_ids[i]))
    rounds = measured.rounds[:, column]
    latency, dropout = median_latency(rounds, settings.t_max)
    if dropout.all():
        return None
    make_tiers = TIERINGS[settings.tiering]
    tiering = make_tiers(np.where(dropout, np.nan, latency), settings.num_tiers)
    if tiering.num_tiers < settings.num_tiers:
        few, wanted = tiering.num_tiers, settings.num_tiers
        log(WARNING, "TiFL: %d tiers instead of %d: the latencies allow no more", few, wanted)
    log(
        INFO,
        "TiFL: tiers of %s nodes, fastest first; %d nodes dropped out",
        tiering.sizes.tolist(),
        dropout.sum(),
    )
    names = [roster.identity(measured.node_ids[i]) for i in column]
    return TieredFleet(TierTable(names, latency, tiering), tiering, rounds)

"""Which node is in which tier, by stable identity, and who of them is there."""

from collections.abc import Container, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.core.tiers import Tiering, place
from flwr_hetero.strategy.roster import Roster


class TierTable:
    """The nodes of each tier. Picking from a tier costs the same whatever the tier's size.

    Parameters
    ----------
    identities : sequence of str
        Nodes that were profiled, sorted.
    latency : ndarray of float64, shape (num_nodes,)
        Median latency in seconds.
    tiering : Tiering
        Tier of each node, -1 for dropouts, and boundaries.

    Attributes
    ----------
    latency : dict of str to float
        Identity to latency in seconds.
    tier : dict of str to int
        Identity to tier; dropouts are not in it.
    members : list of list of str
        Identities of each tier, fastest tier first.
    boundaries : ndarray of float64, shape (num_tiers - 1,)
        Latencies between tiers, to place joiners.
    """

    def __init__(
        self, identities: Iterable[str], latency: NDArray[np.float64], tiering: Tiering
    ) -> None:
        names = list(identities)
        self.latency = dict(zip(names, latency.tolist(), strict=True))
        self.boundaries = tiering.boundaries
        self.tier: dict[str, int] = {}
        self.members: list[list[str]] = [[] for _ in range(tiering.num_tiers)]
        for name, tier in zip(names, tiering.tier.tolist(), strict=True):
            if tier >= 0:
                self._put(name, tier)

    @property
    def num_tiers(self) -> int:
        """Number of tiers."""
        return len(self.members)

    def typical_latency(self) -> NDArray[np.float64]:
        """Return the median latency of each tier's nodes.

        Returns
        -------
        ndarray of float64, shape (num_tiers,)
            In seconds, fastest tier first.
        """
        return np.array([np.median([self.latency[n] for n in names]) for names in self.members])

    def add(self, identity: str, latency_s: float) -> int:
        """Place a joiner by the boundaries between the tiers.

        Parameters
        ----------
        identity : str
            A node without a tier.
        latency_s : float
            Its latency in seconds.

        Returns
        -------
        int
            Its tier.
        """
        tier = int(place([latency_s], self.boundaries)[0])
        self.latency[identity] = latency_s
        self._put(identity, tier)
        return tier

    def pick(
        self,
        tier: int,
        count: int,
        online: Container[int],
        roster: Roster,
        barred: Container[str],
        rng: np.random.Generator,
    ) -> list[int]:
        """Choose nodes of a tier at random among those that are there.

        Parameters
        ----------
        tier : int
            The tier.
        count : int
            Nodes wanted.
        online : container of int
            Node ids that are there.
        roster : Roster
            Identities and node ids.
        barred : container of str
            Identities that must not be chosen.
        rng : np.random.Generator
            Source of chance.

        Returns
        -------
        list of int
            At most ``count`` node ids; fewer if the tier has not more.

        Notes
        -----
        Candidates are drawn without replacement in growing batches until enough of them are
        there, so that a large tier is never walked through while most of it is online.
        """
        members = self.members[tier]
        chosen: list[int] = []
        seen: set[int] = set()
        batch = count
        while len(chosen) < count and len(seen) < len(members):
            batch = min(2 * batch, len(members))
            drawn = rng.choice(len(members), size=batch, replace=False).tolist()
            for position in (p for p in drawn if p not in seen):
                seen.add(position)
                node_id = roster.find(members[position])
                if node_id in online and members[position] not in barred and node_id is not None:
                    chosen.append(node_id)
        return chosen[:count]

    def as_dict(self) -> dict[str, object]:
        """Return tiers, latencies and boundaries, JSON-able, for history and checkpoint."""
        return {
            "tiers": self.tier,
            "latency": self.latency,
            "boundaries": self.boundaries.tolist(),
            "dropouts": sorted(set(self.latency) - set(self.tier)),
            "num_tiers": self.num_tiers,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, object]) -> "TierTable":
        """Rebuild a table from :meth:`as_dict`.

        Parameters
        ----------
        saved : mapping
            As from :meth:`as_dict`.

        Returns
        -------
        TierTable
            An equal one, members in the same order.
        """
        latency: dict[str, float] = dict(saved["latency"])  # type: ignore[call-overload]
        tiers: dict[str, int] = dict(saved["tiers"])  # type: ignore[call-overload]
        num_tiers = int(saved["num_tiers"])  # type: ignore[call-overload]
        empty = Tiering(
            np.empty(0, np.int64),
            np.asarray(saved["boundaries"], np.float64),
            np.zeros(num_tiers),
        )
        table = cls([], np.empty(0), empty)
        table.latency = latency
        for name, tier in tiers.items():
            table._put(name, tier)
        return table

    def _put(self, identity: str, tier: int) -> None:
        self.tier[identity] = tier
        self.members[tier].append(identity)

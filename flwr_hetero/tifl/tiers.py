"""The nodes of each tier, and drawing some of them."""

import json
from collections.abc import Callable, Sequence
from heapq import nsmallest
from typing import NamedTuple, TypeAlias
from zlib import crc32

import numpy as np

from flwr_hetero.errors import invalid
from flwr_hetero.tifl.algorithm import Floats, TierState, draw_tier, place, policy_probs

Available: TypeAlias = Callable[[str], int | None]
"""Return the node id that belongs to an identity; None if it cannot be asked now."""

PANEL = 10
"""Nodes of each tier whose accuracy is that of the tier."""


class Tiers:
    """Which node is in which tier, by stable identity.

    ``latency`` is that of all profiled nodes, ``tier`` leaves out the dropouts.
    """

    def __init__(self, latency: dict[str, float], tier: dict[str, int], boundaries: Floats) -> None:
        self.latency, self.tier, self.boundaries = latency, tier, boundaries
        self.members: list[list[str]] = [[] for _ in range(len(boundaries) + 1)]
        for identity, number in tier.items():
            self.members[number].append(identity)
        self._panel: list[list[str]] | None = None

    def add(self, identity: str, latency_s: float) -> int:
        """Place a late joiner by the boundaries between the tiers."""
        tier = int(place(np.array([latency_s]), self.boundaries)[0])
        self.latency[identity], self.tier[identity] = latency_s, tier
        self.members[tier].append(identity)
        self._panel = None
        return tier

    def moved(self, before: "Tiers") -> bool:
        """Return whether a twentieth of the nodes, at least one, has another tier than before."""
        others = sum(before.tier.get(name) != tier for name, tier in self.tier.items())
        others += len(before.tier.keys() - self.tier.keys())
        fewer = len(self.members) != len(before.members)
        return fewer or others >= max(1, 0.05 * len(self.tier))

    def sample(
        self, tier: int, count: int, available: Available, rng: np.random.Generator
    ) -> list[int]:
        """Draw available nodes of a tier, at most ``count``.

        Candidates are drawn without replacement in growing batches until enough of them are
        available, so that a large tier is not searched while most of it is online.
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
                node_id = available(members[position])
                if node_id is not None:
                    chosen.append(node_id)
        return chosen[:count]

    def panel(self, available: Available) -> list[int]:
        """Return up to ``PANEL`` available nodes of every tier, the same each time if they are."""
        if self._panel is None:
            self._panel = [nsmallest(2 * PANEL, names, _fixed_order) for names in self.members]
        chosen = []
        for names in self._panel:
            chosen += [node for name in names if (node := available(name)) is not None][:PANEL]
        return chosen

    def info(self) -> dict[str, object]:
        """Return all, JSON-able, for the history."""
        return {
            "tiers": self.tier,
            "latency": self.latency,
            "boundaries": self.boundaries.tolist(),
            "dropouts": sorted(set(self.latency) - set(self.tier)),
            "num_tiers": len(self.members),
        }

    @classmethod
    def from_json(cls, text: str) -> "Tiers":
        """Restore what :meth:`info` has told, as JSON."""
        saved = json.loads(text)
        return cls(saved["latency"], saved["tiers"], np.array(saved["boundaries"], np.float64))


def _fixed_order(identity: str) -> int:
    return crc32(identity.encode())


def node_chances(tiers: Tiers, probs: Floats, count: int, available: Available) -> dict[int, float]:
    """Return the chance of each available node to be drawn, by id: its tier's and that in it."""
    chances: dict[int, float] = {}
    for prob, members in zip(probs.tolist(), tiers.members, strict=True):
        free = [node_id for name in members if (node_id := available(name)) is not None]
        chances |= dict.fromkeys(free, prob * min(1.0, count / max(1, len(free))))
    return chances


def check_chances(
    policy: str | Sequence[float], num_tiers: int, credits: Sequence[int] | None, borrow: bool
) -> None:
    """Refuse to undo a selection that leaves nodes without a chance, or without a known one."""
    if not policy_probs(policy, num_tiers).all():
        raise invalid("policy", policy, "give each tier a chance with unbiased=True")
    if credits is not None:
        raise invalid("credits", credits, "be None with unbiased=True")
    if borrow:
        raise invalid("on_small_tier", "borrow", "be 'shrink' with unbiased=True")


class Draw(NamedTuple):
    """The tier of a round, its nodes, and the probabilities by which it was drawn."""

    tier: int | None
    nodes: list[int]
    probs: Floats


def draw_nodes(
    tiers: Tiers,
    state: TierState,
    weights: Floats,
    available: Available,
    count: int,
    borrow: bool,
    rng: np.random.Generator,
) -> tuple[Draw, TierState]:
    """Draw a tier, then nodes of it (Alg. 2, l. 8-15); tiers without available nodes are passed.

    With ``borrow`` a tier with fewer than ``count`` nodes takes some of the next faster ones.
    """
    possible = np.array([bool(members) for members in tiers.members])
    while possible.any():
        tier, probs, after = draw_tier(state, weights, possible, rng)
        nodes: list[int] = []
        for source in range(tier, -1 if borrow else tier - 1, -1):
            if len(nodes) < count:
                nodes += tiers.sample(source, count - len(nodes), available, rng)  # l. 15
        if nodes:
            return Draw(tier, nodes, probs), after
        possible[tier] = False
    return Draw(None, [], np.zeros(len(possible))), state

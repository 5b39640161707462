"""Which node is in which tier, by stable identity, and who of them is there."""

import math
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Message, MetricRecord
from numpy.typing import NDArray

from flwr_hetero._flwr import log
from flwr_hetero.errors import check_count, invalid
from flwr_hetero.server.nodes import NodeRegistry
from flwr_hetero.tifl.algorithm import (
    Rule,
    Tiering,
    change_probs,
    draw_tier,
    normalise,
    place,
    policy_probs,
    resample,
    should_change,
    start_credits,
)


class TierTable:
    """The nodes of each tier. Picking from a tier costs the same whatever the tier's size."""

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
        """Return the median latency of each tier's nodes."""
        return np.array([np.median([self.latency[n] for n in names]) for names in self.members])

    def add(self, identity: str, latency_s: float) -> int:
        """Place a joiner by the boundaries between the tiers."""
        tier = int(place([latency_s], self.boundaries)[0])
        self.latency[identity] = latency_s
        self._put(identity, tier)
        return tier

    def pick(
        self,
        tier: int,
        count: int,
        online: Container[int],
        registry: NodeRegistry,
        barred: Container[str],
        rng: np.random.Generator,
    ) -> list[int]:
        """Choose nodes of a tier at random among those that are there.

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
                node_id = registry.find(members[position])
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
        """Rebuild a table from :meth:`as_dict`."""
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


ADAPTIVE = "adaptive"


@dataclass(frozen=True)
class ChooserSettings:
    """How tiers are chosen; see :class:`~flwr_hetero.strategy.TiFL` for the meaning."""

    policy: str | Sequence[float] = ADAPTIVE
    num_tiers: int = 5
    start_policy: str | Sequence[float] = "uniform"
    interval: int = 10
    trigger: str = "not-improved"
    rule: Rule = "rank"
    exponent: float = 1.0
    credits: int | Sequence[int] | str | None = None
    on_exhausted: str = "refill"

    def __post_init__(self) -> None:
        self.first_probs(self.num_tiers)
        start_credits(self.credits, self.num_tiers, num_rounds=1)
        check_count("interval", self.interval, 1, "10 looks every 10 rounds")
        if self.trigger not in ("not-improved", "always"):
            raise invalid("trigger", self.trigger, "be not-improved or always", "choose one")
        if self.on_exhausted not in ("refill", "ignore", "stop"):
            raise invalid(
                "on_exhausted", self.on_exhausted, "be refill, ignore or stop", "choose one"
            )
        change_probs(np.zeros(self.num_tiers), [True] * self.num_tiers, self.rule, self.exponent)

    @property
    def is_adaptive(self) -> bool:
        """Whether the chances follow the tiers' accuracy."""
        return isinstance(self.policy, str) and self.policy == ADAPTIVE

    def first_probs(self, num_tiers: int) -> NDArray[np.float64]:
        """Return the chances that the run begins with."""
        policy = self.start_policy if self.is_adaptive else self.policy
        if isinstance(policy, str):
            return policy_probs(policy, num_tiers)
        return resample(policy_probs(policy, self.num_tiers), num_tiers)


class TierChooser:
    """Draw a tier a round and keep its books."""

    def __init__(
        self,
        settings: ChooserSettings,
        num_tiers: int,
        num_rounds: int | None,
        latency: NDArray[np.float64] | None = None,
    ) -> None:
        self.settings = settings
        self.probs = settings.first_probs(num_tiers)
        self.accuracy = np.full(num_tiers, np.nan)
        self.full_credits = self._full_credits(num_tiers, num_rounds, latency)
        self.credits = self.full_credits.copy()

    @classmethod
    def restored(cls, settings: ChooserSettings, saved: Mapping[str, Any]) -> "TierChooser":
        """Continue from :meth:`as_dict`, whatever the rounds and latencies were."""
        chooser = cls(replace(settings, credits=None), len(saved["probs"]), None)
        chooser.settings = settings
        chooser.load(saved)
        return chooser

    def chances(self, possible: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the chance of each tier in the next draw."""
        eligible = possible & (self.credits > 0)
        chances = np.zeros(len(self.probs))
        if eligible.any():
            chances[eligible] = normalise(self.probs[eligible])
        return chances

    def choose(self, possible: NDArray[np.bool_], rng: np.random.Generator) -> int | None:
        """Draw a tier."""
        if not possible.any():
            return None
        if not (self.credits[possible] > 0).any() and not self._exhausted():
            return None
        return draw_tier(self.probs, possible & (self.credits > 0), rng)

    def spend(self, tier: int) -> None:
        """Take a credit from a tier that trains."""
        self.credits[tier] -= 1

    def refund(self, tier: int) -> None:
        """Give the credit back to a tier of which nobody answered."""
        self.credits[tier] += 1

    def learn(self, accuracy: NDArray[np.float64], current: int | None) -> None:
        """Take in the tiers' accuracies and change the chances if the trigger says so."""
        previous, self.accuracy = (
            self.accuracy,
            np.where(np.isnan(accuracy), self.accuracy, accuracy),
        )
        triggered = self.settings.trigger == "always" or (
            current is not None and should_change(accuracy[current], previous[current])
        )
        if triggered and not np.isnan(self.accuracy).all():
            everyone = np.ones(len(self.probs), np.bool_)
            self.probs = change_probs(
                self.accuracy, everyone, self.settings.rule, self.settings.exponent
            )
            log(INFO, "TiFL: tier chances are now %s", np.round(self.probs, 3).tolist())

    def take_over(self, old: "TierChooser") -> None:
        """Go on with the books of the tiers before a new profiling; credits refill as new."""
        full = self.full_credits
        self.load(old.as_dict())
        self.full_credits = full

    def as_dict(self) -> dict[str, Any]:
        """Return the books, JSON-able."""
        return {
            "probs": self.probs.tolist(),
            "accuracy": [None if np.isnan(a) else a for a in self.accuracy.tolist()],
            "credits": [None if np.isinf(c) else c for c in self.credits.tolist()],
            "full_credits": [None if np.isinf(c) else c for c in self.full_credits.tolist()],
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from :meth:`as_dict`."""
        self.probs = np.array(saved["probs"], np.float64)
        self.accuracy = np.array(saved["accuracy"], np.float64)  # None becomes NaN
        for name in ("credits", "full_credits"):
            figures = [np.inf if c is None else c for c in saved[name]]
            setattr(self, name, np.array(figures, np.float64))

    def _full_credits(
        self, num_tiers: int, num_rounds: int | None, latency: NDArray[np.float64] | None
    ) -> NDArray[np.float64]:
        credits = self.settings.credits
        if isinstance(credits, str) and credits != "paced" and num_rounds is None:
            log(WARNING, "TiFL: credits=%r needs the number of rounds: no limit instead", credits)
            return np.full(num_tiers, np.inf)
        if credits is None or isinstance(credits, str):
            full = start_credits(credits, num_tiers, max(num_rounds or 1, 1), latency)
        else:
            full = start_credits(credits, self.settings.num_tiers, 1)
            full = np.ceil(resample(full, num_tiers)) if np.isfinite(full).all() else full
        if isinstance(credits, str) and credits == "paced":
            log(INFO, "TiFL: credits %s, refilled when spent", full.astype(int).tolist())
        elif num_rounds is not None and full.sum() < num_rounds:
            log(
                WARNING,
                "TiFL: %d credits for %d rounds; when they are spent: %s",
                full.sum(),
                num_rounds,
                self.settings.on_exhausted,
            )
        return full

    def _exhausted(self) -> bool:
        """Handle spent credits; tell whether the run can go on."""
        action = self.settings.on_exhausted
        log(INFO, "TiFL: no tier that has nodes has credits left: %s", action)
        if action == "stop":
            return False
        self.credits += np.inf if action == "ignore" else self.full_credits
        if action == "refill" and not (self.credits > 0).all():
            self.credits = np.maximum(self.credits, 1)  # tiers that began with none
        return True


class TierDraw(NamedTuple):
    """Who trains in a round."""

    tier: int | None
    nodes: list[int]
    chances: NDArray[np.float64]
    exhausted: bool = False


class Fleet(NamedTuple):
    """Who can be asked."""

    online: Set[int]
    registry: NodeRegistry
    barred: Container[str] = ()


def draw_nodes(
    table: TierTable,
    chooser: TierChooser,
    fleet: Fleet,
    count: int,
    on_small_tier: str,
    rng: np.random.Generator,
) -> TierDraw:
    """Draw a tier, then nodes of it; a tier of which nobody is there is drawn around."""
    possible = np.array([bool(members) for members in table.members])
    fullest = TierDraw(None, [], np.zeros(table.num_tiers))
    while (tier := chooser.choose(possible, rng)) is not None:
        lowest = 0 if on_small_tier == "borrow" else tier
        nodes = _pick(table, range(tier, lowest - 1, -1), fleet, count, rng)
        drawn = TierDraw(tier, nodes, chooser.chances(possible))
        if len(nodes) == count or (nodes and on_small_tier != "skip"):
            return _spend(chooser, drawn)
        fullest = max(fullest, drawn, key=lambda draw: len(draw.nodes))
        possible[tier] = False
    if fullest.nodes:
        log(WARNING, "TiFL: no tier has %d nodes online", count)
    return _spend(chooser, fullest._replace(exhausted=bool(possible.any())))


def sample_tiers(
    table: TierTable, fleet: Fleet, per_tier: int, rng: np.random.Generator
) -> list[int]:
    """Draw some nodes of every tier."""
    return [
        node_id
        for tier in range(table.num_tiers)
        for node_id in _pick(table, [tier], fleet, per_tier, rng)
    ]


def _pick(
    table: TierTable,
    tiers: range | list[int],
    fleet: Fleet,
    count: int,
    rng: np.random.Generator,
) -> list[int]:
    nodes: list[int] = []
    for tier in tiers:
        if len(nodes) < count:
            nodes += table.pick(
                tier, count - len(nodes), fleet.online, fleet.registry, fleet.barred, rng
            )
    return nodes


def _spend(chooser: TierChooser, drawn: TierDraw) -> TierDraw:
    if drawn.tier is not None and drawn.nodes:
        chooser.spend(drawn.tier)
    return drawn


def accuracy_per_tier(
    replies: Sequence[tuple[str, Message]],
    table: TierTable,
    accuracy_key: str | None,
    leaf: object,
) -> NDArray[np.float64]:
    """Average the accuracy that nodes report, by tier and weighted by examples."""
    weight_key = getattr(leaf, "weighted_by_key", "num-examples")
    total, weight = np.zeros(table.num_tiers), np.zeros(table.num_tiers)
    for identity, reply in replies:
        metrics: MetricRecord = next(iter(reply.content.metric_records.values()))
        accuracy, examples = accuracy_of(metrics, accuracy_key), metrics.get(weight_key, 1)
        tier = table.tier.get(identity)
        if tier is None or accuracy is None or not isinstance(examples, (int, float)):
            continue
        total[tier] += accuracy * examples
        weight[tier] += examples
    if replies and not weight.any():
        log(
            WARNING,
            "TiFL: no accuracy in the evaluation replies; set accuracy_key to one of %s",
            sorted(next(iter(replies[0][1].content.metric_records.values()))),
        )
    mean = np.full(table.num_tiers, np.nan)
    np.divide(total, weight, out=mean, where=weight > 0)
    return mean


def accuracy_of(metrics: MetricRecord, accuracy_key: str | None) -> float | None:
    """Read a figure of which more is better."""
    key, sign = accuracy_key, 1.0
    if key is None:
        key = next((name for name in metrics if "acc" in name.lower()), None)
    if key is None:
        key, sign = next((name for name in metrics if "loss" in name.lower()), None), -1.0
    value = metrics.get(key) if key is not None else None
    if isinstance(value, (int, float)) and math.isfinite(value):
        return sign * value
    return None

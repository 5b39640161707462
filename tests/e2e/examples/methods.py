"""What each method does to an app: its two halves, and the effect that the history shows."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from e2e.examples.running import APPS, Seen

from flwr_hetero.server.client_support import MissingClientSupportError

FAST_NODES = ("node-0", "node-2")
SLOW_NODES = ("node-1", "node-3")
ALL_NODES = range(4)


class Method(NamedTuple):
    """A method: the server's strategy, the node's half, and what both together do."""

    wrapped: str | None
    half: str | None
    effect: str
    check: Callable[[Seen, float], None]
    same_work: str | None = None  # the strategy when all nodes train as under FedAvg
    rounds: int = 3


def tiers(seen: Seen, plain_s: float) -> None:
    by_speed = [set(FAST_NODES), set(SLOW_NODES)]
    drawn = [record["tifl"]["tier"] for record in seen.records[3:]]
    assert len(drawn) >= 3
    assert [set(record["selected"]) for record in seen.records[3:]] == [by_speed[i] for i in drawn]
    tier_of = next(r["tifl"]["tiers"] for r in reversed(seen.records) if "tiers" in r["tifl"])
    assert tier_of == dict.fromkeys(FAST_NODES, 0) | dict.fromkeys(SLOW_NODES, 1)


def updates(seen: Seen, plain_s: float) -> None:
    found = [record["fedbuff"] for record in seen.records[1:]]
    nodes = [node for update in found for node in update["nodes"]]
    assert all(len(update["nodes"]) == 2 for update in found)
    assert sum(node in FAST_NODES for node in nodes) > len(nodes) / 2
    assert max(max(update["staleness"]) for update in found) > 0
    assert seen.records[-1]["virtual_s"] < 0.8 * plain_s


def steps(seen: Seen, plain_s: float, name: str = "local_steps") -> None:
    for record in seen.records[2:]:
        asked = record[name]["num_steps"]
        assert asked == dict.fromkeys(FAST_NODES, 8) | dict.fromkeys(SLOW_NODES, 2)
        assert record["train"]["num-steps"] == pytest.approx(5, rel=0.01)
        assert max(record["latency"].values()) < 2 * min(record["latency"].values())
    assert seen.records[-1]["virtual_s"] < 0.8 * plain_s


def biased(seen: Seen, plain_s: float) -> None:
    steps(seen, plain_s, "biased_local_sgd")
    for node in ALL_NODES:
        kept = seen.state(node)
        assert kept["fast"] == (node in (0, 2))
        assert kept["share"] == pytest.approx(8 / 10)


def orders(seen: Seen, plain_s: float) -> None:
    pairs = seen.records[1]["cd_grab"]["pairs"]
    assert pairs > 0
    assert [record["cd_grab"]["pairs_together"] for record in seen.records[1:]] == [pairs] * 3
    for node in ALL_NODES:
        assert seen.state(node)["order.version"] == len(seen.records) - 2


def importance(seen: Seen, plain_s: float) -> None:
    for node in ALL_NODES:
        assert seen.state(node)["steps"] >= 3 * 5
        assert np.ptp(seen.state(node, "arrays")["importance"].numpy()) > 1e-4


def priorities(seen: Seen, plain_s: float) -> None:
    for node in ALL_NODES:
        assert seen.state(node)["batches"] >= 3 * 5
        kept = seen.state(node, "arrays")
        assert (kept["priority"].numpy() != 0).mean() > 0.25
        assert any(kept[name].numpy().any() for name in kept if name.startswith("gradient."))


def exchange(seen: Seen, plain_s: float) -> None:
    assert seen.records[1]["resharding"]["offered_bytes"] > 0
    assert seen.records[1]["resharding"]["swaps"] > 0
    assert seen.records[2]["resharding"]["delivered_bytes"] > 0


# Strategy, half, effect and its check, the strategy of the same work, rounds.
METHODS = {
    "TiFL": Method(
        "TiFL({}, clients_per_round=2, num_tiers=2)", None, "nodes of equal speed train together",
        tiers, "TiFL({}, clients_per_round=4, num_tiers=1)", rounds=6),
    "FedBuff": Method(
        "FedBuff({}, buffer_size=2)", None, "no node waits; two updates make a model",
        updates, "FedBuff({}, buffer_size=4)", rounds=6),
    "LocalSteps": Method(
        "LocalSteps({}, fast_steps=8)", "steps", "8 steps on fast nodes, 2 on slow ones",
        steps, "LocalSteps({}, fast_steps=STEPS, gamma=1)"),
    "BiasedLocalSGD": Method(
        "BiasedLocalSGD({}, fast_steps=8)", "biased", "8 or 2 steps, high losses on fast nodes",
        biased, "BiasedLocalSGD({}, fast_steps=STEPS, gamma=1)"),
    "CDGraB": Method(
        "CDGraB({})", "cd_grab", "each round other orders, balanced over all nodes",
        orders, "CDGraB({})"),
    "MercurySampler": Method(
        None, "mercury", "importance is learned and kept between rounds", importance),
    "PGDSampler": Method(None, "pgd", "priorities are learned and kept between rounds", priorities),
    "Resharding": Method(
        "Resharding({})", "resharding", "samples change places", exchange, "Resharding({})"),
}  # fmt: skip


class Refusal(NamedTuple):
    """An error in place of an effect."""

    error: type[Exception]
    text: str


def missing(name: str, key: str) -> Refusal:
    return Refusal(MissingClientSupportError, f"{name}: no node reports '{key}'")


def no_steps(name: str) -> Refusal:
    rule = f"train by gradient steps inside {name}"
    return Refusal(ValueError, f"strategy must {rule}, got 'FedXgbBagging'.")


def learns_nothing(name: str) -> Refusal:
    return Refusal(RuntimeError, f"{name} learns nothing: no batch was taken or updated")


MISSING = {
    name: missing(name, key)
    for name, key in {
        **dict.fromkeys(("LocalSteps", "BiasedLocalSGD"), "num-steps"),
        "CDGraB": "flwr-hetero.order",
        "Resharding": "flwr-hetero.resharding",
    }.items()
}
"""What each method says of an app that does not do the node's half."""
REFUSED = {
    **{(kind, "Resharding"): MISSING["Resharding"] for kind in APPS if kind != "torch"},
    ("scikit-learn", "CDGraB"): MISSING["CDGraB"],
    ("scikit-learn", "PGDSampler"): learns_nothing("PGDSampler"),
    **{("xgboost", name): learns_nothing(name) for name in ("MercurySampler", "PGDSampler")},
    **{("xgboost", name): no_steps(name) for name in MISSING if name != "Resharding"},
    ("xgboost", "FedBuff"): Refusal(
        ValueError,
        "strategy must average models: updates of trees cannot be added to a newer model, "
        "got 'FedXgbBagging'.",
    ),
}
"""Apps in which a method cannot work, or for which there is no node's half."""

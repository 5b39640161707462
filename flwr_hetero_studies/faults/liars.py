"""What liars gain by early, scaled and turned updates: how far the model moves, and what it knows.

The task and the fleet are those of ``influence.py``. The liars are the quickest nodes. They train
as the others do, and then change their replies.
"""

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, Message
from flwr.serverapp.strategy import FedMedian, FedTrimmedAvg, Krum, Strategy
from numpy.typing import NDArray

from flwr_hetero import strategy as ours
from flwr_hetero.fleet import DeviceProfile, LocalGrid, named_fleet
from flwr_hetero.fleet.local_grid import Answer
from flwr_hetero_studies.core.emulate import drive
from flwr_hetero_studies.faults.influence import NODES, TIMEOUT_S, digits_app, leaf

EARLY, SCALE, LAST = 10.0, 20.0, 10
"""How much sooner liars reply, by what they scale; last models, one in so many is measured."""
Floats = NDArray[np.float32]


def krum() -> Krum:
    return Krum(num_malicious_nodes=3, fraction_evaluate=0.0)


STRATEGIES: dict[str, Callable[[int], Strategy]] = {
    "FedSlice": lambda seed: ours.FedSlice(leaf(), seed=seed),
    "FedBuff": lambda seed: ours.FedBuff(leaf(), seed=seed),
    "TiFL": lambda seed: ours.TiFL(leaf(), 5, seed=seed),
    "BiasedLocalSGD": lambda seed: ours.BiasedLocalSGD(leaf()),
    "CDGraB": lambda seed: ours.CDGraB(leaf()),
    "TiFL, uniform": lambda seed: ours.TiFL(leaf(), 5, policy="uniform", seed=seed),
    "FedBuff(FedMedian)": lambda seed: ours.FedBuff(leaf(FedMedian), seed=seed),
    "FedBuff(FedTrimmedAvg)": lambda seed: ours.FedBuff(leaf(FedTrimmedAvg), seed=seed),
    "FedBuff(Krum)": lambda seed: ours.FedBuff(krum(), seed=seed),
    "FedSlice(FedMedian)": lambda seed: ours.FedSlice(leaf(FedMedian), seed=seed),
    "TiFL(FedMedian)": lambda seed: ours.TiFL(leaf(FedMedian), 5, seed=seed),
    "FedAvg, wrapped": lambda seed: ours.Wrapper(leaf()),
    "FedAvg": lambda seed: leaf(),
    "FedMedian": lambda seed: leaf(FedMedian),
    "FedTrimmedAvg": lambda seed: leaf(FedTrimmedAvg),
    "Krum": lambda seed: krum(),
}
"""Those of this package with their defaults, two without votes for pace, products, Flower's own."""


class Lie(NamedTuple):
    """How a liar changes its reply, and when it comes."""

    scale: float = 1.0
    early: bool = False
    claim: int = 0
    another: bool = False


HONEST = "honest"
LIES = {
    HONEST: Lie(),
    "turned": Lie(-1.0),
    "turned, early": Lie(-1.0, early=True),
    "turned, x 20": Lie(-SCALE),
    "turned, x 20, early": Lie(-SCALE, early=True),
    "another model, 2**53 examples": Lie(claim=2**53, another=True),
}
FACTORS = (2.0, 4.0, 8.0)
"""By what liars scale their updates in search of the worst: less and it is a normal reply, more
and the limit on updates makes it count less and less."""
SCALED = {f"turned, x {factor:g}, early": Lie(-factor, early=True) for factor in FACTORS}
SEARCHED = ("FedSlice", "FedBuff", "TiFL", "BiasedLocalSGD", "CDGraB", "FedAvg, wrapped")
"""Strategies for which the worst factor is searched: this package's defaults."""


def profiles_for(lie: Lie, liars: int) -> list[DeviceProfile]:
    """Return the fleet, of which the first nodes lie."""
    profiles = named_fleet("paper-5", NODES)
    if lie.early:
        quick = max(profiles, key=lambda profile: profile.compute_factor)
        links = {"uplink_mbps": quick.uplink_mbps, "downlink_mbps": quick.downlink_mbps}
        speeds = {"compute_factor": quick.compute_factor, **links}
        early = {name: EARLY * speed for name, speed in speeds.items()}
        profiles[:liars] = [replace(quick, jitter=0.0, **early)] * liars
    return profiles


class LiarsGrid(LocalGrid):
    """Some nodes change their replies to training after the grid has timed them."""

    liars, lie = 0, Lie()

    def _answer(self, message: Message) -> Answer:
        arrival_s, reply = super()._answer(message)
        lies = message.metadata.dst_node_id - 1000 < self.liars
        if lies and message.metadata.message_type == "train" and reply and reply.has_content():
            self.change(message, reply)
        return arrival_s, reply

    def change(self, message: Message, reply: Message) -> None:
        start, end = message.content["arrays"], reply.content["arrays"]
        rng, new = np.random.default_rng(self.seed), {}
        for name, array in start.items():
            before, after = array.numpy(), end[name].numpy()
            other = rng.standard_normal(before.shape) if self.lie.another else after
            new[name] = Array((before + self.lie.scale * (other - before)).astype(np.float32))
        reply.content["arrays"] = ArrayRecord(new)
        if self.lie.claim:
            reply.content["metrics"]["num-examples"] = self.lie.claim


class LastModel(NamedTuple):
    """The last model, and what the run says."""

    model: Floats
    accuracy: float
    share: float | None
    ended: int


def train(name: str, lie: Lie, liars: int, rounds: int, seed: int) -> LastModel:
    """Train among liars, which may be none."""
    app, accuracy = digits_app(seed)
    grid = LiarsGrid(app, profiles_for(lie, liars), seed=seed)
    grid.liars, grid.lie = liars, lie
    start = {"w": Array(np.zeros((64, 10), np.float32)), "b": Array(np.zeros(10, np.float32))}
    models, lines, ended = [ArrayRecord(start)], list[dict[str, Any]](), 1
    how: dict[str, Any] = {"timeout": TIMEOUT_S}
    how["evaluate_fn"] = lambda number, arrays: models.append(arrays)
    strategy = STRATEGIES[name](seed)
    logging.disable()
    try:
        if isinstance(strategy, ours.Wrapper):
            drive(strategy, grid, models[0], lambda now: lines.append(dict(now.record)),
                  seed=seed, rounds=rounds, **how)  # fmt: skip
        else:
            # Flower draws the nodes of a round from it
            random.seed(seed)
            strategy.start(grid, models[0], rounds, **how)
    # that a run ends is what is measured
    except Exception:
        ended = 0
    finally:
        logging.disable(logging.NOTSET)
    names = {name for i in range(liars) for name in (f"node-{i}", f"id-{1000 + i}")}
    shares = [sum(v for n, v in line["weights"].items() if n in names) for line in lines[1:]]
    with np.errstate(all="ignore"):
        last = fmean(accuracy(each) for each in models[-max(1, rounds // LAST) :])
    flat = np.concatenate([array.numpy().ravel() for array in models[-1].values()])
    return LastModel(flat, last, fmean(shares) if shares else None, ended)


@lru_cache(maxsize=4)
def honest(name: str, rounds: int, seed: int) -> LastModel:
    return train(name, LIES[HONEST], 0, rounds, seed)


def run(name: str, lie: str, liars: int, rounds: int, seed: int) -> dict[str, Any]:
    """Run with and without liars; the displacement is in distances that honest nodes go."""
    # a server update of FedBuff holds half of the nodes
    rounds *= 2 if name.startswith("FedBuff") else 1
    base = honest(name, rounds, seed)
    found = train(name, (LIES | SCALED)[lie], liars, rounds, seed) if liars else base
    with np.errstate(all="ignore"):
        moved = np.linalg.norm(found.model - base.model) / np.linalg.norm(base.model)
    metrics = {"accuracy": found.accuracy, "displacement": float(min(moved, 1e9))}
    return {"metrics": metrics | {"share": found.share, "ended": found.ended}}

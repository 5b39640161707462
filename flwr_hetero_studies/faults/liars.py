"""What liars gain by early, scaled and turned updates: how far they move the model.

The task is that of ``digits.py``, on the fleet ``paper-5``. The liars are the quickest nodes. They
train as the others do, and then change their replies.
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
from flwr.serverapp.strategy import FedAvg, FedMedian, FedTrimmedAvg, Krum, Strategy
from numpy.typing import NDArray

from flwr_hetero import strategy as ours
from flwr_hetero.fleet import DeviceProfile, LocalGrid, named_fleet
from flwr_hetero.fleet.local_grid import Answer
from flwr_hetero_studies.core.emulate import drive
from flwr_hetero_studies.faults.digits import NODES, digits_app, first_model

TIMEOUT_S = 30.0
EARLY = 10.0
"""How much quicker than any honest node the liars are that reply early."""
LAST = 10
"""The accuracy is a mean over the last models, which are one in so many."""
Floats = NDArray[np.float32]


def leaf(strategy: type[FedAvg] = FedAvg) -> FedAvg:
    return strategy(fraction_evaluate=0.0)


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
"""This package's strategies with their defaults, compositions of them, and Flower's own."""


class Lie(NamedTuple):
    """How a liar changes its reply, and when the reply comes."""

    scale: float = 1.0
    early: bool = False
    claim: int = 0
    another: bool = False


HONEST = "honest"
LIES = {
    HONEST: Lie(),
    "turned": Lie(-1.0),
    "turned, early": Lie(-1.0, early=True),
    "turned, x 20": Lie(-20.0),
    "turned, x 20, early": Lie(-20.0, early=True),
    "another model, 2**53 examples": Lie(claim=2**53, another=True),
}
FACTORS = (2.0, 4.0, 8.0)
"""Scales among which the worst is searched: a longer update counts less and less."""
SCALED = {f"turned, x {factor:g}, early": Lie(-factor, early=True) for factor in FACTORS}
SEARCHED = ("FedSlice", "FedBuff", "TiFL", "BiasedLocalSGD", "CDGraB", "FedAvg, wrapped")
"""This package's defaults, for which the worst factor is searched."""


def profiles_for(lie: Lie, liars: int) -> list[DeviceProfile]:
    """Return the fleet, in which the first nodes lie."""
    profiles = named_fleet("paper-5", NODES)
    if lie.early:
        quick = max(profiles, key=lambda profile: profile.compute_factor)
        early = replace(
            quick,
            jitter=0.0,
            compute_factor=EARLY * quick.compute_factor,
            uplink_mbps=EARLY * quick.uplink_mbps,
            downlink_mbps=EARLY * quick.downlink_mbps,
        )
        profiles[:liars] = [early] * liars
    return profiles


class LiarsGrid(LocalGrid):
    """Some nodes change their replies to training after the grid has timed them."""

    liars = 0
    lie = Lie()

    def _answer(self, message: Message) -> Answer:
        arrival_s, reply = super()._answer(message)
        lies = message.metadata.dst_node_id - 1000 < self.liars
        is_training = message.metadata.message_type == "train"
        if lies and is_training and reply is not None and reply.has_content():
            self.change(message, reply)
        return arrival_s, reply

    def change(self, message: Message, reply: Message) -> None:
        rng = np.random.default_rng(self.seed)
        changed = {}
        for name, array in message.content["arrays"].items():
            before = array.numpy()
            goal = reply.content["arrays"][name].numpy()
            if self.lie.another:
                goal = rng.standard_normal(before.shape)
            changed[name] = Array((before + self.lie.scale * (goal - before)).astype(np.float32))
        reply.content["arrays"] = ArrayRecord(changed)
        if self.lie.claim:
            reply.content["metrics"]["num-examples"] = self.lie.claim


class LastModel(NamedTuple):
    """The last model, and what the run says of it."""

    model: Floats
    accuracy: float
    share: float | None
    ended: int


def train(name: str, lie: Lie, liars: int, rounds: int, seed: int) -> LastModel:
    """Train among so many liars."""
    app, accuracy = digits_app(seed)
    grid = LiarsGrid(app, profiles_for(lie, liars), seed=seed)
    grid.liars = liars
    grid.lie = lie
    models = [first_model()]
    lines: list[dict[str, Any]] = []
    strategy = STRATEGIES[name](seed)
    settings: dict[str, Any] = {"timeout": TIMEOUT_S}
    settings["evaluate_fn"] = lambda number, arrays: models.append(arrays)
    ended = 1
    logging.disable()
    try:
        if isinstance(strategy, ours.Wrapper):
            drive(
                strategy,
                grid,
                models[0],
                lambda moment: lines.append(dict(moment.record)),
                seed=seed,
                rounds=rounds,
                **settings,
            )
        else:
            # Flower's strategies draw the nodes of a round from this generator.
            random.seed(seed)
            strategy.start(grid, models[0], rounds, **settings)
    # The study counts runs that end with an error, whatever the error.
    except Exception:
        ended = 0
    finally:
        logging.disable(logging.NOTSET)
    names = {name for i in range(liars) for name in (f"node-{i}", f"id-{1000 + i}")}
    # The first line of a history is that of profiling.
    weights = [line["weights"].items() for line in lines[1:]]
    shares = [sum(v for node, v in items if node in names) for items in weights]
    with np.errstate(all="ignore"):
        last = fmean(accuracy(model) for model in models[-max(1, rounds // LAST) :])
    flat = np.concatenate([array.numpy().ravel() for array in models[-1].values()])
    return LastModel(flat, last, fmean(shares) if shares else None, ended)


@lru_cache(maxsize=4)
def honest(name: str, rounds: int, seed: int) -> LastModel:
    return train(name, LIES[HONEST], 0, rounds, seed)


def run(name: str, lie: str, liars: int, rounds: int, seed: int) -> dict[str, Any]:
    """Run with and without liars; the displacement is in distances that honest nodes go."""
    # A server update of FedBuff holds replies of half of the nodes.
    if name.startswith("FedBuff"):
        rounds *= 2
    base = honest(name, rounds, seed)
    found = base
    if liars:
        found = train(name, (LIES | SCALED)[lie], liars, rounds, seed)
    with np.errstate(all="ignore"):
        moved = np.linalg.norm(found.model - base.model) / np.linalg.norm(base.model)
    displacement = float(min(moved, 1e9))
    metrics = {"accuracy": found.accuracy, "displacement": displacement}
    return {"metrics": metrics | {"share": found.share, "ended": found.ended}}

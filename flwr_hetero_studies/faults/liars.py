"""What liars gain by turned and scaled updates that come early.

The task is that of ``digits.py``, on the fleet ``paper-5``. The liars are the quickest nodes. They
train as the others do, and then turn the sign of their updates and scale them.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from logging import CRITICAL
from statistics import fmean

import numpy as np
from flwr.app import Array, ArrayRecord, Message
from flwr.serverapp.strategy import FedAvg

from flwr_hetero import strategy as ours
from flwr_hetero.fleet import DeviceProfile, LocalGrid, named_fleet
from flwr_hetero.fleet.local_grid import Answer
from flwr_hetero_studies.core.quiet import only_errors
from flwr_hetero_studies.faults.digits import NODES, digits_app, first_model

TIMEOUT_S = 30.0
EARLY = 10.0
"""How much quicker than any honest node the liars are."""
LAST = 10
"""The accuracy is a mean over the last models, which are one in so many."""
COUNTS = (1, 3)
FACTORS = (1.0, 2.0, 4.0, 8.0)
"""Scales among which the worst is searched: a longer update counts less and less."""


def fedavg() -> FedAvg:
    return FedAvg(fraction_evaluate=0.0)


STRATEGIES: dict[str, Callable[[int], ours.Wrapper]] = {
    "FedSlice": lambda seed: ours.FedSlice(fedavg(), seed=seed),
    "FedBuff": lambda seed: ours.FedBuff(fedavg(), seed=seed),
    "TiFL": lambda seed: ours.TiFL(fedavg(), 5, seed=seed),
    "BiasedLocalSGD": lambda seed: ours.BiasedLocalSGD(fedavg()),
    "CDGraB": lambda seed: ours.CDGraB(fedavg()),
    "FedAvg, wrapped": lambda seed: ours.Wrapper(fedavg()),
}


def profiles_for(liars: int) -> list[DeviceProfile]:
    """Return the fleet, in which the first nodes lie, and reply early."""
    profiles = named_fleet("paper-5", NODES)
    quick = max(profiles, key=lambda profile: profile.compute_factor)
    early = replace(
        quick,
        jitter=0.0,
        compute_factor=EARLY * quick.compute_factor,
        uplink_mbps=EARLY * quick.uplink_mbps,
        downlink_mbps=EARLY * quick.downlink_mbps,
    )
    return [early] * liars + profiles[liars:]


class LiarsGrid(LocalGrid):
    """Some nodes turn and scale their updates after the grid has timed them."""

    liars = 0
    factor = 1.0

    def _answer(self, message: Message) -> Answer:
        arrival_s, reply = super()._answer(message)
        lies = message.metadata.dst_node_id - 1000 < self.liars
        is_training = message.metadata.message_type == "train"
        if lies and is_training and reply is not None and reply.has_content():
            self.turn(message, reply)
        return arrival_s, reply

    def turn(self, message: Message, reply: Message) -> None:
        turned = {}
        for name, array in message.content["arrays"].items():
            before = array.numpy()
            update = reply.content["arrays"][name].numpy() - before
            turned[name] = Array((before - self.factor * update).astype(np.float32))
        reply.content["arrays"] = ArrayRecord(turned)


def run(name: str, liars: int, factor: float, rounds: int, seed: int) -> dict[str, float]:
    """Train among so many liars; return the accuracy at the end."""
    # A server update of FedBuff holds replies of half of the nodes.
    if name == "FedBuff":
        rounds *= 2
    app, accuracy = digits_app(seed)
    grid = LiarsGrid(app, profiles_for(liars), seed=seed)
    grid.liars = liars
    grid.factor = factor
    models = [first_model()]
    # Flower's strategies draw the nodes of a round from this generator.
    random.seed(seed)
    with only_errors(CRITICAL), np.errstate(all="ignore"):
        STRATEGIES[name](seed).start(
            grid,
            models[0],
            rounds,
            timeout=TIMEOUT_S,
            evaluate_fn=lambda number, arrays: models.append(arrays),
        )
        return {"accuracy": fmean(map(accuracy, models[-max(1, rounds // LAST) :]))}

"""What liars gain by turned and scaled updates that come early.

20 nodes of the fleet ``paper-5`` learn digits by softmax regression. Sizes are lognormal, and
labels are divided by Dirichlet(0.5). The liars are the quickest nodes. They train as the others
do, and then turn the sign of their updates and scale them.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from logging import CRITICAL
from statistics import fmean
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits

from flwr_hetero import keys
from flwr_hetero import strategy as ours
from flwr_hetero.fleet import DeviceProfile, LocalGrid, named_fleet
from flwr_hetero.fleet.local_grid import Answer
from flwr_hetero.mod import restore, save_state
from flwr_hetero.sampler import OrderedSampler
from flwr_hetero_studies.core.quiet import only_errors

NODES = 20
BATCH = 16
RATE = 0.5
SIGMA = 1.0
ALPHA = 0.5
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


def first_model() -> ArrayRecord:
    weights = np.zeros((64, 10), np.float32)
    return ArrayRecord({"w": Array(weights), "b": Array(np.zeros(10, np.float32))})


def digits_app(seed: int) -> tuple[ClientApp, Callable[[ArrayRecord], float]]:
    """Return a ClientApp that learns digits, and a function for the accuracy on a third of all."""
    images, labels = load_digits(return_X_y=True)
    images = images / 16
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    test, train = np.split(order, [len(order) // 3])
    sizes = rng.lognormal(0, SIGMA, NODES)
    parts: list[list[int]] = [[] for _ in range(NODES)]
    for label in range(10):
        share = rng.dirichlet(np.full(NODES, ALPHA)) * sizes
        rows = train[labels[train] == label]
        holders = rng.choice(NODES, len(rows), p=share / share.sum())
        for node, row in zip(holders, rows, strict=True):
            parts[node].append(int(row))
    # No node is left without an example.
    parts = [part or [int(train[0])] for part in parts]
    app = ClientApp()

    def accuracy(rows: Any, arrays: ArrayRecord) -> float:
        logits = images[rows] @ arrays["w"].numpy() + arrays["b"].numpy()
        return float((logits.argmax(1) == labels[rows]).mean())

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        node = int(context.node_config[keys.PARTITION_ID])
        arrays = message.content["arrays"]
        config = message.content["config"]
        w = arrays["w"].numpy().copy()
        b = arrays["b"].numpy().copy()
        own_rng = np.random.default_rng([seed, node, int(config.get(keys.SERVER_ROUND, 0))])
        steps = int(config.get(keys.NUM_STEPS, -(-len(parts[node]) // BATCH)))
        ordered = sampler_of(message, context, len(parts[node]))
        for _ in range(steps):
            if ordered is None:
                chosen = own_rng.choice(parts[node], BATCH)
            else:
                chosen = np.array(parts[node])[ordered.next_batch()[0]]
            slope_w, slope_b = gradient(w, b, images[chosen], labels[chosen])
            if ordered is not None:
                flat = np.concatenate([slope_w.ravel(), slope_b.ravel()])
                ordered.observe(torch.from_numpy(flat[None].astype(np.float32)))
            w -= (RATE * slope_w).astype(np.float32)
            b -= (RATE * slope_b).astype(np.float32)
        metrics = {"num-examples": len(parts[node]), "train-loss": 1.0}
        metrics |= {"num-steps": steps, "examples-processed": BATCH * steps}
        model = ArrayRecord({"w": Array(w), "b": Array(b)})
        content = RecordDict({"arrays": model, "metrics": MetricRecord(metrics)})
        if ordered is not None:
            save_state(context, "order", ordered.state_dict())
            content[keys.ORDER] = ConfigRecord(ordered.report())
        return Message(content, reply_to=message)

    @app.evaluate()
    def measure(message: Message, context: Context) -> Message:
        rows = parts[int(context.node_config[keys.PARTITION_ID])]
        found = accuracy(rows, message.content["arrays"])
        metrics = MetricRecord({"num-examples": len(rows), "eval-acc": found})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app, partial(accuracy, test)


def gradient(w: Any, b: Any, inputs: Any, labels: Any) -> tuple[Any, Any]:
    """Return the mean cross-entropy's gradients by w, (64, 10), and by b, (10,)."""
    logits = inputs @ w + b
    error = np.exp(logits - logits.max(1, keepdims=True))
    error /= error.sum(1, keepdims=True)
    error[np.arange(len(error)), labels] -= 1
    return inputs.T @ error / len(error), error.mean(0)


def sampler_of(message: Message, context: Context, size: int) -> OrderedSampler | None:
    """Return what orders a node's batches, if CD-GraB asks for an order."""
    asked = message.content.config_records.get(keys.ORDER)
    if asked is None:
        return None
    sampler = OrderedSampler(size, BATCH, seed=int(context.node_config[keys.PARTITION_ID]))
    restore(sampler, context, "order")
    sampler.follow(asked)
    return sampler

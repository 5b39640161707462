"""How much a node gains by what it says: its share of the model, among 20 nodes that learn digits.

Softmax regression, sizes lognormal and labels by Dirichlet(0.5), the fleet ``paper-5``. The liar is
the slowest node or the slowest six, without rounds the quickest; it trains as the others do, and
then changes its reply.
"""

import logging
from collections.abc import Callable
from functools import partial
from statistics import mean
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedMedian, Strategy
from sklearn.datasets import load_digits

from flwr_hetero import keys
from flwr_hetero import strategy as ours
from flwr_hetero.fleet import Fault, LocalGrid, named_fleet
from flwr_hetero.fleet.local_grid import Answer
from flwr_hetero.mod import restore, save_state
from flwr_hetero.sampler import OrderedSampler
from flwr_hetero_studies import rivals
from flwr_hetero_studies.core.emulate import drive

NODES, BATCH, RATE, TIMEOUT_S = 20, 16, 0.5, 30.0
SIGMA, ALPHA = 1.0, 0.5
Lie = Callable[[RecordDict], None]


def leaf(strategy: type[FedAvg] = FedAvg) -> Strategy:
    return strategy(fraction_evaluate=0.0)


WRAPPERS: dict[str, Callable[[int], ours.Wrapper]] = {
    "FedAvg": lambda seed: ours.RandomSelection(leaf(), 10, seed=seed),
    "FedMedian": lambda seed: ours.RandomSelection(leaf(FedMedian), 10, seed=seed),
    "TiFL, adaptive": lambda seed: ours.TiFL(leaf(), 4, seed=seed),
    "TiFL, fast": lambda seed: ours.TiFL(leaf(), 4, policy="fast", seed=seed),
    "BiasedLocalSGD": lambda seed: ours.BiasedLocalSGD(leaf(), 16),
    "BiasedLocalSGD, steps": lambda seed: ours.BiasedLocalSGD(leaf(), 16, weigh_by_steps=True),
    "LocalSteps, deadline": lambda seed: ours.LocalSteps(
        leaf(), 16, budget="deadline", weigh_by_steps=True
    ),
    "FedNova": lambda seed: ours.FedNova(leaf(), 16),
    "AdaComm": lambda seed: rivals.AdaComm(leaf(), 16, interval_s=1.0),
    "CDGraB": lambda seed: ours.CDGraB(leaf(), sketch_size=4),
    "OverSelect": lambda seed: ours.OverSelect(ours.RandomSelection(leaf(), 10, seed=seed), take=7),
    "FedBuff": lambda seed: ours.FedBuff(leaf(), seed=seed),
    "FedBuff, slices": lambda seed: ours.FedBuff(
        ours.LocalSteps(leaf(), 16, budget="slice"), seed=seed
    ),
    "FedAsync": lambda seed: rivals.FedAsync(leaf(), seed=seed),
    "FedAT": lambda seed: rivals.FedAT(leaf(), 4, seed=seed),
    "FedCompass": lambda seed: rivals.FedCompass(leaf(), 4, 16, seed=seed),
    "Oort": lambda seed: rivals.Oort(leaf(), 4, profiling=True, seed=seed),
    "PowerOfChoice": lambda seed: rivals.PowerOfChoice(leaf(), 4, seed=seed),
    "DeadlineSelection": lambda seed: rivals.DeadlineSelection(leaf(), 4, seed=seed),
}
WITHOUT_ROUNDS = ("FedBuff", "FedAsync", "FedAT", "FedCompass")
BY_LOSS = ("Oort", "PowerOfChoice", "AdaComm")


def claimed(record: str, **claims: float) -> Lie:
    new = {name.replace("_", "-"): value for name, value in claims.items()}
    return lambda content: content[record].update(new)


def filled(value: float, dtype: type) -> Lie:
    def lie(content: RecordDict) -> None:
        arrays = content.array_records["arrays"]
        new = {name: Array(np.full(a.shape, value, dtype)) for name, a in arrays.items()}
        content["arrays"] = ArrayRecord(new)

    return lie


def renamed(content: RecordDict) -> None:
    content["x"] = content.pop("arrays")


LIES: dict[str, Lie | None] = {
    "honest": None,
    "2**53 examples": claimed("metrics", num_examples=2**53),
    "no time": claimed(keys.TIMING, train_time=0.0, transfer_time=0.0),
    "a loss of 1e9": claimed("metrics", train_loss=1e9),
    "values of 9e14": filled(9e14, np.float32),
    "int64 of 2**62": filled(2**62, np.int64),
    "model under another name": renamed,
    "never answers": None,
}


class LyingGrid(LocalGrid):
    """Some nodes change their replies to training after the grid has timed them."""

    liars: frozenset[int] = frozenset()
    lie: Lie | None = None

    def _answer(self, message: Message) -> Answer:
        arrival_s, reply = super()._answer(message)
        mine = message.metadata.dst_node_id - 1000 in self.liars
        trained = message.metadata.message_type == "train" and reply is not None
        # after the grid has timed it: a lie takes no time
        if mine and trained and self.lie and reply.has_content():
            self.lie(reply.content)
        return arrival_s, reply


def digits_app(seed: int) -> tuple[ClientApp, Callable[[ArrayRecord], float]]:
    """Return a ClientApp that learns digits, and the accuracy on a third of all."""
    images, labels = load_digits(return_X_y=True)
    images, rng = images / 16, np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    test, train = order[: len(order) // 3], order[len(order) // 3 :]
    sizes = rng.lognormal(0, SIGMA, NODES)
    parts: list[list[int]] = [[] for _ in range(NODES)]
    for label in range(10):
        share = rng.dirichlet(np.full(NODES, ALPHA)) * sizes
        chosen = rng.choice(NODES, (labels[train] == label).sum(), p=share / share.sum())
        for node, sample in zip(chosen, train[labels[train] == label], strict=True):
            parts[node].append(int(sample))
    parts = [part or [int(train[0])] for part in parts]
    app = ClientApp()

    def right(rows: Any, arrays: ArrayRecord) -> float:
        found = (images[rows] @ arrays["w"].numpy() + arrays["b"].numpy()).argmax(1)
        return float((found == labels[rows]).mean())

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        node = int(context.node_config[keys.PARTITION_ID])
        arrays, config = message.content["arrays"], message.content["config"]
        w, b = arrays["w"].numpy().copy(), arrays["b"].numpy().copy()
        own = np.random.default_rng([seed, node, int(config.get(keys.SERVER_ROUND, 0))])
        steps = int(config.get(keys.NUM_STEPS, -(-len(parts[node]) // BATCH)))
        ordered = order_of(message, context, len(parts[node]))
        for _ in range(steps):
            if ordered is None:
                chosen = own.choice(parts[node], BATCH)
            else:
                chosen = np.array(parts[node])[ordered.next_batch()[0]]
            x = images[chosen]
            logits = x @ w + b
            p = np.exp(logits - logits.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            p[np.arange(len(p)), labels[chosen]] -= 1
            step = x.T @ p / len(p), p.mean(0)
            if ordered is not None:
                flat = np.concatenate([each.ravel() for each in step])
                ordered.observe(torch.from_numpy(flat[None].astype(np.float32)))
            w -= (RATE * step[0]).astype(np.float32)
            b -= (RATE * step[1]).astype(np.float32)
        own_work = {"num-steps": steps, "examples-processed": BATCH * steps}
        metrics = MetricRecord({"num-examples": len(parts[node]), "train-loss": 1.0, **own_work})
        new = ArrayRecord({"w": Array(w), "b": Array(b)})
        content = RecordDict({"arrays": new, "metrics": metrics})
        if ordered is not None:
            save_state(context, "order", ordered.state_dict())
            content[keys.ORDER] = ConfigRecord(ordered.report())
        return Message(content, reply_to=message)

    @app.evaluate()
    def measure(message: Message, context: Context) -> Message:
        rows = parts[int(context.node_config[keys.PARTITION_ID])]
        own = {"num-examples": len(rows), "eval-acc": right(rows, message.content["arrays"])}
        return Message(RecordDict({"metrics": MetricRecord(own)}), reply_to=message)

    return app, partial(right, test)


def order_of(message: Message, context: Context, size: int) -> OrderedSampler | None:
    """Return what orders a node's batches, if CD-GraB asks for it."""
    if (asked := message.content.config_records.get(keys.ORDER)) is None:
        return None
    sampler = OrderedSampler(size, BATCH, seed=int(context.node_config[keys.PARTITION_ID]))
    restore(sampler, context, "order")
    sampler.follow(asked)
    return sampler


def run(wrapper: str, lie: str, liars: int, rounds: int, seed: int) -> dict[str, Any]:
    """Run once; return the liars' share of the model, the others' steps, accuracy and time."""
    app, accuracy = digits_app(seed)
    # engines without rounds hardly merge what the slowest send
    slow = not wrapper.startswith(WITHOUT_ROUNDS)
    chosen = range(NODES - liars, NODES) if slow else range(liars)
    silent = [Fault(i, "dies", message_type=kind) for i in chosen for kind in ("train", "evaluate")]
    faults = silent if lie == "never answers" else []
    grid = LyingGrid(app, named_fleet("paper-5", NODES), seed=seed, faults=faults)
    grid.liars, grid.lie = frozenset(chosen), LIES[lie]
    names = {name for i in chosen for name in (f"node-{i}", f"id-{1000 + i}")}
    arrays = {"w": Array(np.zeros((64, 10), np.float32)), "b": Array(np.zeros(10, np.float32))}
    models, lines, ended = [ArrayRecord(arrays)], list[dict[str, Any]](), 1
    how = {"timeout": TIMEOUT_S, "evaluate_fn": lambda number, arrays: models.append(arrays)}
    logging.disable()
    try:
        drive(WRAPPERS[wrapper](seed), grid, models[0], lambda now: lines.append(now.record),
              seed=seed, rounds=rounds, **how)  # fmt: skip
    # that a run ends is what is measured
    except Exception:
        ended = 0
    finally:
        logging.disable(logging.NOTSET)
    weights = [line["weights"] for line in lines[1:]]
    shares = [sum(share for node, share in own.items() if node in names) for own in weights]
    parts = [own for line in lines[len(lines) // 2 :] for own in line.values()]
    told = [own.get("num_steps") for own in parts if isinstance(own, dict)]
    told = [own.items() for own in told if isinstance(own, dict)]
    steps = [count for own in told for node, count in own if node not in names]
    with np.errstate(all="ignore"):
        found = {"ended": ended, "accuracy": accuracy(models[-1])}
    found |= {"share": mean(shares or [0.0]), "steps": mean(steps) if steps else None}
    return {"metrics": found | {"virtual_s": lines[-1]["virtual_s"] if lines else 0.0}}

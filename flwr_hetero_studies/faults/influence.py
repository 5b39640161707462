"""How much a node gains by what it says: its share of the model, among 20 nodes that learn digits.

Softmax regression, sizes lognormal and labels by Dirichlet(0.5), the fleet ``paper-5``. The liar is
the slowest node or the slowest six, without rounds the quickest; it trains as the others do, and
then changes its reply.
"""

import logging
from collections.abc import Callable
from statistics import mean
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedMedian, Strategy
from sklearn.datasets import load_digits

from flwr_hetero import keys
from flwr_hetero.fleet import Fault, LocalGrid, named_fleet
from flwr_hetero.fleet.local_node import Answer
from flwr_hetero.strategy import (
    BiasedLocalSGD,
    CDGraB,
    FedBuff,
    FedNova,
    LocalSteps,
    OverSelect,
    RandomSelection,
    TiFL,
    Wrapper,
)
from flwr_hetero_studies.core.emulate import drive
from flwr_hetero_studies.rivals import (
    AdaComm,
    DeadlineSelection,
    FedAsync,
    FedAT,
    FedCompass,
    Oort,
    PowerOfChoice,
)

NODES, BATCH, RATE, TIMEOUT_S = 20, 16, 0.5, 30.0
SIGMA, ALPHA = 1.0, 0.5
Lie = Callable[[RecordDict], None]


def leaf() -> Strategy:
    return FedAvg(fraction_evaluate=0.0)


WRAPPERS: dict[str, Callable[[int], Wrapper]] = {
    "FedAvg": lambda seed: RandomSelection(leaf(), 10, seed=seed),
    "FedMedian": lambda seed: RandomSelection(FedMedian(fraction_evaluate=0.0), 10, seed=seed),
    "TiFL, adaptive": lambda seed: TiFL(leaf(), 4, seed=seed),
    "TiFL, fast": lambda seed: TiFL(leaf(), 4, policy="fast", seed=seed),
    "BiasedLocalSGD": lambda seed: BiasedLocalSGD(leaf(), 16),
    "BiasedLocalSGD, steps": lambda seed: BiasedLocalSGD(leaf(), 16, weigh_by_steps=True),
    "LocalSteps, deadline": lambda seed: LocalSteps(
        leaf(), 16, budget="deadline", weigh_by_steps=True
    ),
    "FedNova": lambda seed: FedNova(leaf(), 16),
    "AdaComm": lambda seed: AdaComm(leaf(), 16, interval_s=1.0),
    "CDGraB": lambda seed: CDGraB(leaf(), sketch_size=4),
    "OverSelect": lambda seed: OverSelect(RandomSelection(leaf(), 10, seed=seed), take=7),
    "FedBuff": lambda seed: FedBuff(leaf(), seed=seed),
    "FedBuff, slices": lambda seed: FedBuff(LocalSteps(leaf(), 16, budget="slice"), seed=seed),
    "FedAsync": lambda seed: FedAsync(leaf(), seed=seed),
    "FedAT": lambda seed: FedAT(leaf(), 4, seed=seed),
    "FedCompass": lambda seed: FedCompass(leaf(), 4, 16, seed=seed),
    "Oort": lambda seed: Oort(leaf(), 4, profiling=True, seed=seed),
    "PowerOfChoice": lambda seed: PowerOfChoice(leaf(), 4, seed=seed),
    "DeadlineSelection": lambda seed: DeadlineSelection(leaf(), 4, seed=seed),
}
WITHOUT_ROUNDS = ("FedBuff", "FedAsync", "FedAT", "FedCompass")
BY_LOSS = ("Oort", "PowerOfChoice", "AdaComm")


def examples(content: RecordDict) -> None:
    content.metric_records["metrics"]["num-examples"] = 2**53


def no_time(content: RecordDict) -> None:
    timing = content.config_records[keys.TIMING]
    timing[keys.TRAIN_TIME] = timing[keys.TRANSFER_TIME] = 0.0


def large_loss(content: RecordDict) -> None:
    content.metric_records["metrics"]["train-loss"] = 1e9


def filled(value: float, dtype: type) -> Lie:
    def lie(content: RecordDict) -> None:
        arrays = content.array_records["arrays"]
        content["arrays"] = ArrayRecord(
            {name: Array(np.full(a.shape, value, dtype)) for name, a in arrays.items()}
        )

    return lie


def renamed(content: RecordDict) -> None:
    content["x"] = content.pop("arrays")


LARGE_LOSS = "a loss of 1e9"
LIES: dict[str, Lie | None] = {
    "honest": None,
    "2**53 examples": examples,
    "no time": no_time,
    LARGE_LOSS: large_loss,
    "values of 9e14": filled(9e14, np.float32),
    "int64 of 2**62": filled(2**62, np.int64),
    "model under another name": renamed,
    "never answers": None,
}


class LyingGrid(LocalGrid):
    """Some nodes change their replies to training after the grid has timed them."""

    liars: frozenset[int] = frozenset()
    lie: Lie | None = None

    def _answers(self, messages: list[Message]) -> list[Answer]:
        answers = zip(messages, super()._answers(messages), strict=True)
        return [self.rewritten(message, *answer) for message, answer in answers]

    def rewritten(self, message: Message, arrival_s: float, reply: Message | None) -> Answer:
        """Return when a reply arrives, and what has become of it."""
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

    def logits(x: Any, w: Any, b: Any) -> Any:
        return x @ w + b

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        node = int(context.node_config[keys.PARTITION_ID])
        arrays, config = message.content["arrays"], message.content["config"]
        w, b = arrays["w"].numpy().copy(), arrays["b"].numpy().copy()
        own = np.random.default_rng([seed, node, int(config.get(keys.SERVER_ROUND, 0))])
        steps = int(config.get(keys.NUM_STEPS, -(-len(parts[node]) // BATCH)))
        for _ in range(steps):
            x = images[chosen := own.choice(parts[node], BATCH)]
            p = np.exp(logits(x, w, b) - logits(x, w, b).max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            p[np.arange(BATCH), labels[chosen]] -= 1
            w -= (RATE / BATCH * x.T @ p).astype(np.float32)
            b -= (RATE / BATCH * p.sum(0)).astype(np.float32)
        own_work = {"num-steps": steps, "examples-processed": BATCH * steps}
        metrics = MetricRecord({"num-examples": len(parts[node]), "train-loss": 1.0, **own_work})
        new = ArrayRecord({"w": Array(w), "b": Array(b)})
        return Message(RecordDict({"arrays": new, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def measure(message: Message, context: Context) -> Message:
        node, arrays = int(context.node_config[keys.PARTITION_ID]), message.content["arrays"]
        found = logits(images[parts[node]], arrays["w"].numpy(), arrays["b"].numpy()).argmax(1)
        right = float((found == labels[parts[node]]).mean())
        metrics = MetricRecord({"num-examples": len(parts[node]), "eval-acc": right})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    def accuracy(arrays: ArrayRecord) -> float:
        found = logits(images[test], arrays["w"].numpy(), arrays["b"].numpy()).argmax(1)
        return float((found == labels[test]).mean())

    return app, accuracy


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
    models, lines, ended = [ArrayRecord(arrays)], [], 1
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
    steps = [
        count
        for line in lines[len(lines) // 2 :]
        for own in line.values()
        if isinstance(own, dict) and isinstance(own.get("num_steps"), dict)
        for node, count in own["num_steps"].items()
        if node not in names
    ]
    with np.errstate(all="ignore"):
        found = accuracy(models[-1])
    metrics = {
        "ended": ended,
        "share": mean(shares) if shares else 0.0,
        "steps": mean(steps) if steps else None,
        "accuracy": found,
        "counted": sum(map(bool, weights)) / rounds,
        "virtual_s": lines[-1]["virtual_s"] if lines else 0.0,
    }
    return {"metrics": metrics}

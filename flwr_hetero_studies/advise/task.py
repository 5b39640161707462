"""A small task to try settings with: generated data, and a network in NumPy, for runs are many."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero.client.emulation import in_config, repeat_of
from flwr_hetero_studies.tasks.partitions import partition_rows

CLASSES, GROUPS, DIM, HIDDEN = 10, 4, 24, 48
"""Classes, groups of examples within each, inputs, hidden units."""
NOISE = 1.1
"""Standard deviation within a group, where the groups' centres have 1."""
TEST = 1000
Floats: TypeAlias = NDArray[np.float64]


class Data(NamedTuple):
    """Inputs and their labels."""

    inputs: Floats
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Task:
    """What the nodes hold and train."""

    num_nodes: int
    examples: int = 128
    """Per node, on average."""
    partition: str = "dirichlet"
    seed: int = 0
    batch_size: int = 8
    learning_rate: float = 0.1

    @property
    def app(self) -> ClientApp:
        """What a node does."""
        return client_app(self)

    def first(self) -> ArrayRecord:
        """Draw the initial model."""
        rng = np.random.default_rng([self.seed, 1])
        shapes = ((DIM, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))
        scale = [2 / s[0] if len(s) == 2 else 0.0 for s in shapes]
        drawn = (rng.standard_normal(s) * v**0.5 for s, v in zip(shapes, scale, strict=True))
        return ArrayRecord({str(i): Array(a) for i, a in enumerate(drawn)})

    def measure(self, arrays: ArrayRecord, slow: list[int]) -> tuple[float, float]:
        """Return accuracy on all test examples, and on classes as the slow nodes hold them."""
        test, model = data(self, 0), [array.numpy() for array in arrays.values()]
        right = forward(model, test.inputs)[1].argmax(1) == test.labels
        by_class = np.bincount(test.labels, right, CLASSES) / np.bincount(test.labels)
        held = np.concatenate([data(self, 1).labels[parts(self)[node]] for node in slow])
        shares = np.bincount(held, minlength=CLASSES) / len(held)
        return float(right.mean()), float(shares @ by_class)


@lru_cache(maxsize=16)
def data(task: Task, split: int) -> Data:
    """Draw the examples to train on (split 1) or to test by (split 0)."""
    centres = np.random.default_rng([task.seed, 2]).standard_normal((CLASSES, GROUPS, DIM))
    rng = np.random.default_rng([task.seed, 3, split])
    labels = np.arange(task.num_nodes * task.examples if split else TEST) % CLASSES
    chosen = centres[labels, rng.integers(GROUPS, size=len(labels))]
    return Data(chosen + NOISE * rng.standard_normal((len(labels), DIM)), labels)


@lru_cache(maxsize=8)
def parts(task: Task) -> list[NDArray[np.int64]]:
    """Divide the examples among the nodes."""
    return partition_rows(data(task, 1).labels, task.num_nodes, task.partition, seed=task.seed)


def forward(model: list[Floats], inputs: Floats) -> tuple[Floats, Floats]:
    """Return hidden units and logits."""
    hidden = np.maximum(inputs @ model[0] + model[1], 0)
    return hidden, hidden @ model[2] + model[3]


def step(model: list[Floats], batch: Data, lr: float) -> Floats:
    """Take a step of SGD on the cross entropy in place; return the losses before it."""
    hidden, logits = forward(model, batch.inputs)
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    rows = np.arange(len(probs))
    losses = -np.log(np.maximum(probs[rows, batch.labels], 1e-30))
    probs[rows, batch.labels] -= 1
    error = probs / len(probs)
    back = (error @ model[2].T) * (hidden > 0)
    slopes = (batch.inputs.T @ back, back.sum(0), hidden.T @ error, error.sum(0))
    for array, slope in zip(model, slopes, strict=True):
        array -= lr * slope
    return np.asarray(losses)


def client_app(task: Task) -> ClientApp:
    """Make the ClientApp: train, or say how much work that would be."""
    app = ClientApp()

    def opened(message: Message, context: Context) -> tuple[Data, int, UniformSampler]:
        node = int(context.node_config[keys.PARTITION_ID])
        rows = parts(task)[node]
        entropy = [task.seed, node, in_config(message, keys.SERVER_ROUND), *repeat_of(message)]
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        sampler = UniformSampler(len(rows), task.batch_size, seed=seed)
        own = data(task, 1)
        steps = in_config(message, keys.NUM_STEPS) or len(sampler)
        return Data(own.inputs[rows], own.labels[rows]), steps, sampler

    def work(own: Data, steps: int, processed: int) -> MetricRecord:
        metrics = {keys.NUM_EXAMPLES: len(own.labels), keys.NUM_STEPS: steps}
        return MetricRecord({**metrics, keys.EXAMPLES_PROCESSED: processed})

    @app.train()
    def train(message: Message, context: Context) -> Message:
        own, steps, sampler = opened(message, context)
        model = [a.numpy().copy() for a in message.content.array_records["arrays"].values()]
        squares, processed = 0.0, 0
        for _ in range(steps):
            rows, _ = sampler.next_batch()
            losses = step(model, Data(own.inputs[rows], own.labels[rows]), task.learning_rate)
            squares, processed = squares + float(losses @ losses), processed + len(rows)
        arrays = ArrayRecord({str(i): Array(a) for i, a in enumerate(model)})
        metrics = work(own, steps, processed)
        metrics[keys.LOSS_RMS] = (squares / processed) ** 0.5
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.train("profile")
    def profile(message: Message, context: Context) -> Message:
        own, steps, _ = opened(message, context)
        return Message(RecordDict({"metrics": work(own, steps, len(own.labels))}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        own, *_ = opened(message, context)
        model = [a.numpy() for a in message.content.array_records["arrays"].values()]
        right = float((forward(model, own.inputs)[1].argmax(1) == own.labels).mean())
        metrics = MetricRecord({keys.NUM_EXAMPLES: len(own.labels), "eval-acc": right})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app

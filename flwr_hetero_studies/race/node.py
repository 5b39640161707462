"""What a node of the race does: plain SGD on a small network, in NumPy because races are many.

The same steps as the package's own loop in torch takes (a test compares them), five times sooner.
Texts, and networks with convolutions, train with that loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.client.batch_sampler import BatchSampler, UniformSampler
from flwr_hetero.client.emulation import in_config, repeat_of
from flwr_hetero.mod import emulated_device, follow
from flwr_hetero.sampler import TopLossSampler
from flwr_hetero_studies.tasks import make_model, model_from
from flwr_hetero_studies.tasks.data import HELD_OUT_SHARE, Examples
from flwr_hetero_studies.tasks.node import PROXIMAL_MU, examples_in
from flwr_hetero_studies.tasks.partitions import partition_rows
from flwr_hetero_studies.tasks.sources import open_source
from flwr_hetero_studies.tasks.training import train

Floats = NDArray[np.float32]
Network = list[Floats]
HIDDEN = 100
NUMPY = "mlp-100"
"""The network that trains in NumPy: one hidden layer of 100 units."""
IN_TORCH = "flwr_hetero_studies.race.node:in_torch"
"""The same network in torch."""


@dataclass(frozen=True)
class Task:
    """Examples to train on, cut from them those to tune by, and those of the report."""

    dataset: str
    model: str
    partition: str
    num_nodes: int
    train: int
    valid: int
    test: int


class Labelled(NamedTuple):
    """Inputs, standardised, and their labels."""

    inputs: NDArray[Any]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, rows: Any) -> "Labelled":
        """Take some of them."""
        return Labelled(self.inputs[rows], self.labels[rows])


# --- data ----------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def splits(task: Task) -> dict[str, Labelled]:
    """Load what is trained on, what is tuned by (the rows after it) and what is reported."""
    source = open_source(task.dataset)
    order = np.arange(len(source.train.rows))
    count, tune = task.train, task.valid
    if count + tune > len(order):  # a small data set: a quarter is to tune by
        count, tune = len(order) * 3 // 4, len(order) // 4
    if len(source.shape) == 1:  # texts lie class by class
        order = np.random.default_rng(0).permutation(order)
    rows = {
        "train": (source.train, order[:count]),
        "valid": (source.train, order[count : count + tune]),
        "test": (source.test, np.random.default_rng(0).permutation(len(source.test.rows))),
    }
    found = {}
    for name, (split, chosen) in rows.items():
        chosen = chosen[: task.test] if name == "test" else chosen
        if not len(chosen):  # nothing to tune by
            continue
        inputs = split.inputs.take(split.rows[chosen])
        if source.scale is not None:
            inputs = (inputs - source.scale.mean) / source.scale.std
        if task.model == NUMPY:
            inputs = inputs.reshape(len(inputs), -1)
        found[name] = Labelled(inputs, split.labels[chosen])
    return found


@lru_cache(maxsize=8)
def parts(task: Task, seed: int) -> list[NDArray[np.int64]]:
    """Divide the training examples among the nodes."""
    labels = splits(task)["train"].labels
    return partition_rows(labels, task.num_nodes, task.partition, seed=seed)


# --- the network ---------------------------------------------------------------------------


def forward(net: Network, inputs: Floats) -> tuple[Floats, Floats]:
    """Return the hidden units and the logits."""
    hidden = np.maximum(inputs @ net[0].T + net[1], 0)
    return hidden, hidden @ net[2].T + net[3]


def losses_of(logits: Floats, labels: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return each example's cross entropy, and its gradient by the logits."""
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    losses = -np.log(np.maximum(probs[rows, labels], 1e-30))
    probs[rows, labels] -= 1
    return losses, probs


def descend(net: Network, examples: Labelled, lr: float, pull: Sequence[Floats], mu: float) -> Any:
    """Take one step of SGD in place; return the losses before it."""
    hidden, logits = forward(net, examples.inputs)
    losses, error = losses_of(logits, examples.labels)
    error /= len(error)
    back = (error @ net[2]) * (hidden > 0)
    slopes = (back.T @ examples.inputs, back.sum(axis=0), error.T @ hidden, error.sum(axis=0))
    for number, (array, slope) in enumerate(zip(net, slopes, strict=True)):
        if mu:
            slope += mu * (array - pull[number])
        slope *= lr
        array -= slope
    return losses


def first_model(task: Task, seed: int) -> ArrayRecord:
    """Draw the initial model, by torch's rule."""
    shape, count = shape_of(task)
    if task.model != NUMPY:
        return ArrayRecord(make_model(task.model, shape, count, seed).state_dict())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = in_torch(shape, count)
    return record_of([parameter.detach().numpy() for parameter in model.parameters()])


def shape_of(task: Task) -> tuple[tuple[int, ...], int]:
    source = open_source(task.dataset)
    return source.shape, source.num_classes


def record_of(net: Network) -> ArrayRecord:
    return ArrayRecord({str(number): Array(array) for number, array in enumerate(net)})


def network_of(arrays: ArrayRecord) -> Network:
    return [np.array(array.numpy(), np.float32) for array in arrays.values()]


def predict(task: Task, model: dict[str, NDArray[Any]], inputs: NDArray[Any]) -> Floats:
    """Return the logits of a model."""
    if task.model == NUMPY:
        return forward(list(model.values()), inputs)[1]
    state = {name: torch.from_numpy(array) for name, array in model.items()}
    net = model_from(state, task.model, *shape_of(task)).eval()
    with torch.inference_mode():
        return torch.cat([net(batch) for batch in torch.from_numpy(inputs).split(500)]).numpy()


def in_torch(shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
    """Build the network."""
    layers = torch.nn.Linear(int(np.prod(shape)), HIDDEN), torch.nn.Linear(HIDDEN, num_classes)
    return torch.nn.Sequential(torch.nn.Flatten(), layers[0], torch.nn.ReLU(), layers[1])


# --- the ClientApp ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A node's data and settings for one message."""

    message: Message
    task: Task
    config: dict[str, Any]
    examples: Labelled
    held_out: Labelled
    seed: int

    @property
    def num_steps(self) -> int:
        """Steps that the server asks for, else an epoch."""
        epoch = -(-len(self.examples) // self.config["batch-size"])
        return in_config(self.message, keys.NUM_STEPS) or epoch

    def metrics(self, processed: int) -> MetricRecord:
        """Say how much work it was."""
        return MetricRecord({
            keys.NUM_EXAMPLES: len(self.examples),
            keys.NUM_STEPS: self.num_steps,
            keys.EXAMPLES_PROCESSED: processed,
        })  # fmt: skip

    def reply(self, arrays: ArrayRecord, losses: tuple[float, float], processed: int) -> Message:
        """Send the model, with mean and root mean square of the losses."""
        metrics = self.metrics(processed)
        metrics["train-loss"], metrics[keys.LOSS_RMS] = losses
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=self.message)


def opened(task: Task, message: Message, context: Context) -> Node:
    """Read a node's data and settings for a message."""
    config, number = dict(context.run_config), int(context.node_config[keys.PARTITION_ID])
    seed = int(config["seed"])
    rows = parts(task, seed)[number]
    cut = len(rows) - max(1, round(len(rows) * HELD_OUT_SHARE))
    every = splits(task)["train"]
    entropy = [seed, number, in_config(message, keys.SERVER_ROUND), *repeat_of(message)]
    own = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    return Node(message, task, config, every.at(rows[:cut]), every.at(rows[cut:]), own)


def sampler_of(node: Node, biased: bool) -> BatchSampler:
    """Make what draws the batches: by loss where biased local SGD asks for it."""
    size = len(node.examples), int(node.config["batch-size"])
    return (TopLossSampler if biased else UniformSampler)(*size, seed=node.seed)


def train_numpy(node: Node, sampler: BatchSampler, mu: float) -> Message:
    """Train in NumPy."""
    net = network_of(node.message.content.array_records["arrays"])
    start = [array.copy() for array in net] if mu else []
    total = square = 0.0
    processed = 0
    for _ in range(node.num_steps):
        indices, _ = sampler.next_batch()
        lr = float(node.config["learning-rate"])
        losses = descend(net, node.examples.at(indices), lr, start, mu)
        sampler.update(indices, losses.astype(np.float64))
        total, square = total + float(losses.sum()), square + float(losses @ losses)
        processed += len(indices)
    means = total / processed, sqrt(square / processed)
    return node.reply(record_of(net), means, processed)


def train_torch(node: Node, sampler: BatchSampler, mu: float) -> Message:
    """Train with the package's own loop."""
    state = node.message.content.array_records["arrays"].to_torch_state_dict()
    model = model_from(state, node.task.model, *shape_of(node.task))
    examples = Examples(*(torch.from_numpy(array) for array in node.examples))
    lr = float(node.config["learning-rate"])
    done = train(model, examples, sampler, num_steps=node.num_steps, lr=lr, proximal=mu)
    arrays, rms = ArrayRecord(model.state_dict()), done.loss_rms
    return node.reply(arrays, (done.loss, rms), done.examples_processed)


def client_app(task: Task) -> ClientApp:
    """Make the app of every node."""
    app = ClientApp(mods=[emulated_device])

    @app.train()
    def train_node(message: Message, context: Context) -> Message:
        node = opened(task, message, context)
        record = message.content.config_records.get("config", {})
        sampler = sampler_of(node, biased=keys.FAST in record)
        if isinstance(sampler, TopLossSampler):
            follow(sampler, message, context)
        mu = float(record.get(PROXIMAL_MU, 0.0))
        return (train_numpy if task.model == NUMPY else train_torch)(node, sampler, mu)

    @app.train("profile")
    def profile_node(message: Message, context: Context) -> Message:
        node = opened(task, message, context)
        size = node.config["batch-size"]
        metrics = node.metrics(examples_in(node.num_steps, len(node.examples), size))
        content = {"arrays": message.content.array_records["arrays"], "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate_node(message: Message, context: Context) -> Message:
        node = opened(task, message, context)
        arrays = message.content.array_records["arrays"]
        model = {name: array.numpy() for name, array in arrays.items()}
        logits = predict(task, model, node.held_out.inputs)
        losses, _ = losses_of(logits, node.held_out.labels)
        right = float((logits.argmax(1) == node.held_out.labels).mean())
        metrics = MetricRecord({"eval-loss": float(losses.mean()), "eval-acc": right})
        metrics[keys.NUM_EXAMPLES] = len(node.held_out)
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app

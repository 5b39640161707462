"""What the nodes of the race learn, and what they do: plain SGD, in NumPy or by the apps' loop."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_hetero import keys
from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero.client.emulation import in_config
from flwr_hetero.mod import emulated_device, follow
from flwr_hetero.sampler import TopLossSampler
from flwr_hetero_studies.race import network
from flwr_hetero_studies.race.network import Labelled, Rows, Values
from flwr_hetero_studies.tasks import make_model, model_from
from flwr_hetero_studies.tasks.data import HELD_OUT_SHARE, Examples
from flwr_hetero_studies.tasks.node import PROXIMAL_MU, examples_in, seed_of
from flwr_hetero_studies.tasks.partitions import partition_rows
from flwr_hetero_studies.tasks.sources import open_source
from flwr_hetero_studies.tasks.training import train

HIDDEN = 100
NUMPY, IN_TORCH = "mlp-100", "flwr_hetero_studies.race.node:in_torch"
"""The network that trains in NumPy, with one hidden layer of 100 units; the same in torch."""
STATE = "optimizer"
"""Of a node's optimizer, where it is kept, in its context."""
NORMED = "flwr_hetero_studies.race.node:normed"


def in_torch(shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
    layers = torch.nn.Linear(int(np.prod(shape)), HIDDEN), torch.nn.Linear(HIDDEN, num_classes)
    return torch.nn.Sequential(torch.nn.Flatten(), layers[0], torch.nn.ReLU(), layers[1])


def normed(shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
    """Make a CNN with batch normalisation, of two layers and 37 kB for images of 28 x 28."""
    layers, channels = list[torch.nn.Module](), shape[0]
    for width in (8, 16):
        convolve = torch.nn.Conv2d(channels, width, 3, padding=1, bias=False)
        layers += [convolve, torch.nn.BatchNorm2d(width), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
        channels = width
    size = channels * (shape[1] // 4) * (shape[2] // 4)
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(size, num_classes))


@dataclass(frozen=True)
class Learning:
    """A data set, of whose first rows are trained on, the next to tune by; how they are dealt."""

    dataset: str
    model: str
    partition: str
    num_nodes: int
    rows: tuple[int, int, int]
    """Examples to train on, to tune by, and of the report."""
    seed: int
    optimizer: str = "sgd"
    """Of the nodes: sgd, momentum or adam; other ones than sgd in NumPy only."""

    @property
    def splits(self) -> dict[str, Labelled]:
        return load(self.dataset, self.rows, self.model == NUMPY)

    @property
    def shape(self) -> tuple[tuple[int, ...], int]:
        source = open_source(self.dataset)
        return source.shape, source.num_classes

    @property
    def app(self) -> ClientApp:
        return client_app(self)

    def first(self) -> ArrayRecord:
        if self.model != NUMPY:
            return ArrayRecord(make_model(self.model, *self.shape, self.seed).state_dict())
        # the caller draws by torch, too
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = in_torch(*self.shape)
        return network.record_of([parameter.detach().numpy() for parameter in model.parameters()])

    def predict(self, model: dict[str, Values], inputs: Values) -> Values:
        if self.model == NUMPY:
            return network.forward(list(model.values()), inputs)[1]
        state = {name: torch.from_numpy(array) for name, array in model.items()}
        net = model_from(state, self.model, *self.shape).eval()
        with torch.inference_mode():
            batches = torch.split(torch.from_numpy(inputs), 500)
            return torch.cat([net(batch) for batch in batches]).numpy()

    def cut(self, count: int) -> int:
        """Return how many of a node's examples are trained on; the last ones are held out."""
        return count - max(1, round(count * HELD_OUT_SHARE))

    def measure(
        self, model: dict[str, Values], slow: list[int], split: str = "test"
    ) -> tuple[float, float]:
        """Return accuracy on all examples, and on classes as the slow nodes hold them."""
        inputs, labels = self.splits[split]
        # classes count as often as the slow nodes hold them
        own = np.concatenate([deal(self)[node] for node in slow])
        held = self.splits["train"].labels[own]
        return network.accuracies(self.predict(model, inputs), labels, held)


@lru_cache(maxsize=2)
def load(dataset: str, rows: tuple[int, int, int], flat: bool) -> dict[str, Labelled]:
    source, (count, tune, test) = open_source(dataset), rows
    order = np.arange(len(source.train.rows))
    # a small data set: a quarter is to tune by
    if count + tune > len(order):
        count, tune = len(order) * 3 // 4, len(order) // 4
    # texts lie class by class
    if len(source.shape) == 1:
        order = np.random.default_rng(0).permutation(order)
    # shuffled: test files may be sorted by class
    tests = np.random.default_rng(0).permutation(len(source.test.rows))
    chosen = {"train": (source.train, order[:count]), "test": (source.test, tests[:test]),
              "valid": (source.train, order[count : count + tune])}  # fmt: skip
    found = {}
    for name, (split, own) in chosen.items():
        # nothing to tune by
        if not len(own):
            continue
        inputs = split.inputs.take(split.rows[own])
        if source.scale is not None:
            inputs = (inputs - source.scale.mean) / source.scale.std
        found[name] = Labelled(inputs.reshape(len(own), -1) if flat else inputs, split.labels[own])
    return found


@lru_cache(maxsize=8)
def deal(learning: Learning) -> list[Rows]:
    labels = learning.splits["train"].labels
    return partition_rows(labels, learning.num_nodes, learning.partition, seed=learning.seed)


class Share(NamedTuple):
    """What a node has for one message: examples, those held out, steps, a seed."""

    examples: Labelled
    held_out: Labelled
    num_steps: int
    seed: int

    def reply(self, message: Message, arrays: ArrayRecord, count: int, **more: float) -> Message:
        work = {keys.NUM_EXAMPLES: len(self.examples), keys.NUM_STEPS: self.num_steps}
        metrics = MetricRecord({**work, keys.EXAMPLES_PROCESSED: count, **more})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def share_of(learning: Learning, message: Message, context: Context) -> Share:
    """Read a node's data; without a number of steps asked for, it takes an epoch."""
    number, every = int(context.node_config[keys.PARTITION_ID]), learning.splits["train"]
    rows = deal(learning)[number]
    cut = learning.cut(len(rows))
    seed = seed_of(message, learning.seed, number)
    steps = in_config(message, keys.NUM_STEPS) or -(-cut // int(context.run_config["batch-size"]))
    held_out = every.at(rows[cut:] if cut < len(rows) else rows)
    return Share(every.at(rows[:cut]), held_out, steps, seed)


def client_app(learning: Learning) -> ClientApp:
    app = ClientApp(mods=[emulated_device])

    @app.train()
    def train_node(message: Message, context: Context) -> Message:
        own, arrays = share_of(learning, message, context), message.content.array_records["arrays"]
        config: Any = message.content.config_records.get("config", {})
        size, lr = int(context.run_config["batch-size"]), float(context.run_config["learning-rate"])
        # batches by loss where biased local SGD asks for it
        kind = TopLossSampler if keys.FAST in config else UniformSampler
        sampler = kind(len(own.examples), size, seed=own.seed)
        if isinstance(sampler, TopLossSampler):
            follow(sampler, message, context)
        mu, steps = float(config.get(PROXIMAL_MU, 0.0)), own.num_steps
        if learning.model == NUMPY:
            net = network.network_of(arrays)
            kept = config.get(keys.KEEP_OPTIMIZER, False) and learning.optimizer != "sgd"
            state = context.state.array_records.get(STATE, ArrayRecord()) if kept else ArrayRecord()
            optimizer = network.Optimizer(learning.optimizer, network.network_of(state))
            done = network.train_numpy(net, own.examples, sampler, steps, lr, mu, optimizer)
            new = network.record_of(net)
            if kept:
                context.state[STATE] = network.record_of(optimizer.state)
        else:
            model = model_from(arrays.to_torch_state_dict(), learning.model, *learning.shape)
            inputs, labels = map(torch.from_numpy, own.examples)
            examples = Examples(inputs, labels)
            done = train(model, examples, sampler, num_steps=steps, lr=lr, proximal=mu)
            new = ArrayRecord(model.state_dict())
        losses = {"train-loss": done.loss, keys.LOSS_RMS: done.loss_rms}
        return own.reply(message, new, done.examples_processed, **losses)

    @app.train("profile")
    def profile_node(message: Message, context: Context) -> Message:
        own, size = share_of(learning, message, context), int(context.run_config["batch-size"])
        processed = examples_in(own.num_steps, len(own.examples), size)
        return own.reply(message, message.content.array_records["arrays"], processed)

    @app.evaluate()
    def evaluate_node(message: Message, context: Context) -> Message:
        own, arrays = share_of(learning, message, context), message.content.array_records["arrays"]
        model = {name: array.numpy() for name, array in arrays.items()}
        logits, labels = learning.predict(model, own.held_out.inputs), own.held_out.labels
        losses, _ = network.losses_of(logits, labels)
        right = float((logits.argmax(1) == labels).mean())
        metrics = MetricRecord({"eval-loss": float(losses.mean()), "eval-acc": right})
        metrics[keys.NUM_EXAMPLES] = len(labels)
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app

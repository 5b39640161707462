"""What the nodes of the race learn and do: plain SGD, in NumPy or by the apps' loop."""

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
NUMPY = "mlp-100"
"""A network with one hidden layer of 100 units, which trains in NumPy."""
STATE = "optimizer"
"""Where a node keeps its optimizer's state in its context."""
NORMED = "flwr_hetero_studies.race.node:normed"


def in_torch(shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
    hidden = torch.nn.Linear(int(np.prod(shape)), HIDDEN)
    output = torch.nn.Linear(HIDDEN, num_classes)
    return torch.nn.Sequential(torch.nn.Flatten(), hidden, torch.nn.ReLU(), output)


def normed(shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
    """Make a CNN with batch normalisation, of two layers and 37 kB for images of 28 x 28."""
    layers: list[torch.nn.Module] = []
    channels = shape[0]
    for width in (8, 16):
        convolve = torch.nn.Conv2d(channels, width, 3, padding=1, bias=False)
        layers += [convolve, torch.nn.BatchNorm2d(width), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
        channels = width
    size = channels * (shape[1] // 4) * (shape[2] // 4)
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(size, num_classes))


@dataclass(frozen=True)
class Learning:
    """A data set, which of its rows are used for what, and how they are divided among nodes."""

    dataset: str
    model: str
    partition: str
    num_nodes: int
    rows: tuple[int, int, int]
    """Numbers of examples to train on, to tune with, and to test on."""
    seed: int
    optimizer: str = "sgd"
    """The nodes' optimizer: sgd, and in NumPy also momentum or adam."""

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
        # The caller uses torch's generator, too.
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
        """Return how many of a node's examples are trained on, of which the rest is held out."""
        return count - max(1, round(count * HELD_OUT_SHARE))

    def measure(
        self, model: dict[str, Values], slow: list[int], split: str = "test"
    ) -> tuple[float, float]:
        """Return accuracy on all examples, and with classes as often as slow nodes hold them."""
        inputs, labels = self.splits[split]
        rows = np.concatenate([deal(self)[node] for node in slow])
        held = self.splits["train"].labels[rows]
        return network.accuracies(self.predict(model, inputs), labels, held)


@lru_cache(maxsize=2)
def load(dataset: str, rows: tuple[int, int, int], flat: bool) -> dict[str, Labelled]:
    count, tune, test = rows
    source = open_source(dataset)
    order = np.arange(len(source.train.rows))
    # Of a small data set a quarter is kept to tune with.
    if count + tune > len(order):
        count = len(order) * 3 // 4
        tune = len(order) // 4
    # Texts are sorted by class.
    if len(source.shape) == 1:
        order = np.random.default_rng(0).permutation(order)
    # Test files may be sorted by class, too.
    tests = np.random.default_rng(0).permutation(len(source.test.rows))
    chosen = {"train": (source.train, order[:count]), "test": (source.test, tests[:test]),
              "valid": (source.train, order[count : count + tune])}  # fmt: skip
    found = {}
    for name, (split, places) in chosen.items():
        # There may be nothing to tune with.
        if not len(places):
            continue
        inputs = split.inputs.take(split.rows[places])
        if source.scale is not None:
            inputs = (inputs - source.scale.mean) / source.scale.std
        if flat:
            inputs = inputs.reshape(len(places), -1)
        found[name] = Labelled(inputs, split.labels[places])
    return found


@lru_cache(maxsize=8)
def deal(learning: Learning) -> list[Rows]:
    labels = learning.splits["train"].labels
    return partition_rows(labels, learning.num_nodes, learning.partition, seed=learning.seed)


class Share(NamedTuple):
    """What a node has for one message."""

    examples: Labelled
    held_out: Labelled
    num_steps: int
    seed: int

    def reply(self, message: Message, arrays: ArrayRecord, count: int, **more: float) -> Message:
        work = {keys.NUM_EXAMPLES: len(self.examples), keys.NUM_STEPS: self.num_steps}
        metrics = MetricRecord({**work, keys.EXAMPLES_PROCESSED: count, **more})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def share_of(learning: Learning, message: Message, context: Context) -> Share:
    """Read a node's data; it takes an epoch unless the server asks for a number of steps."""
    node = int(context.node_config[keys.PARTITION_ID])
    examples = learning.splits["train"]
    rows = deal(learning)[node]
    cut = learning.cut(len(rows))
    seed = seed_of(message, learning.seed, node)
    steps = in_config(message, keys.NUM_STEPS) or -(-cut // int(context.run_config["batch-size"]))
    held_out = examples.at(rows[cut:] if cut < len(rows) else rows)
    return Share(examples.at(rows[:cut]), held_out, steps, seed)


def client_app(learning: Learning) -> ClientApp:
    app = ClientApp(mods=[emulated_device])

    @app.train()
    def train_node(message: Message, context: Context) -> Message:
        share = share_of(learning, message, context)
        arrays = message.content.array_records["arrays"]
        config: Any = message.content.config_records.get("config", {})
        batch_size = int(context.run_config["batch-size"])
        lr = float(context.run_config["learning-rate"])
        # Biased local SGD asks for batches by loss.
        kind = TopLossSampler if keys.FAST in config else UniformSampler
        sampler = kind(len(share.examples), batch_size, seed=share.seed)
        if isinstance(sampler, TopLossSampler):
            follow(sampler, message, context)
        mu = float(config.get(PROXIMAL_MU, 0.0))
        steps = share.num_steps
        if learning.model == NUMPY:
            net = network.network_of(arrays)
            kept = config.get(keys.KEEP_OPTIMIZER, False) and learning.optimizer != "sgd"
            state = context.state.array_records.get(STATE, ArrayRecord()) if kept else ArrayRecord()
            optimizer = network.Optimizer(learning.optimizer, network.network_of(state))
            done = network.train_numpy(net, share.examples, sampler, steps, lr, mu, optimizer)
            new = network.record_of(net)
            if kept:
                context.state[STATE] = network.record_of(optimizer.state)
        else:
            model = model_from(arrays.to_torch_state_dict(), learning.model, *learning.shape)
            inputs, labels = map(torch.from_numpy, share.examples)
            examples = Examples(inputs, labels)
            done = train(model, examples, sampler, num_steps=steps, lr=lr, proximal=mu)
            new = ArrayRecord(model.state_dict())
        losses = {"train-loss": done.loss, keys.LOSS_RMS: done.loss_rms}
        return share.reply(message, new, done.examples_processed, **losses)

    @app.train("profile")
    def profile_node(message: Message, context: Context) -> Message:
        share = share_of(learning, message, context)
        batch_size = int(context.run_config["batch-size"])
        processed = examples_in(share.num_steps, len(share.examples), batch_size)
        return share.reply(message, message.content.array_records["arrays"], processed)

    @app.evaluate()
    def evaluate_node(message: Message, context: Context) -> Message:
        inputs, labels = share_of(learning, message, context).held_out
        arrays = message.content.array_records["arrays"]
        model = {name: array.numpy() for name, array in arrays.items()}
        logits = learning.predict(model, inputs)
        losses, _ = network.losses_of(logits, labels)
        right = float((logits.argmax(1) == labels).mean())
        metrics = MetricRecord({"eval-loss": float(losses.mean()), "eval-acc": right})
        metrics[keys.NUM_EXAMPLES] = len(labels)
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app

"""A small task to try settings with: generated data, and a network in NumPy, for runs are many."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_hetero import keys
from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero.client.emulation import in_config, repeat_of
from flwr_hetero_studies.race.network import (
    Labelled,
    Rows,
    Values,
    accuracies,
    forward,
    network_of,
    record_of,
    train_numpy,
)
from flwr_hetero_studies.tasks.partitions import partition_rows

CLASSES, GROUPS, DIM, HIDDEN = 10, 4, 24, 48
"""Classes, groups of examples within each, inputs, hidden units."""
NOISE = 1.1
"""Standard deviation within a group, where the groups' centres have 1."""
TEST = 1000


@dataclass(frozen=True)
class SmallTask:
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
        return client_app(self)

    def first(self) -> ArrayRecord:
        rng = np.random.default_rng([self.seed, 1])
        shapes = ((DIM, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))
        # by He: rectified units keep the size of what goes in
        scale = [2 / s[0] if len(s) == 2 else 0.0 for s in shapes]
        drawn = (rng.standard_normal(s) * v**0.5 for s, v in zip(shapes, scale, strict=True))
        return record_of([np.ascontiguousarray(array.T) for array in drawn])

    def measure(self, model: dict[str, Values], slow: list[int]) -> tuple[float, float]:
        """Return accuracy on all test examples, and on classes as the slow nodes hold them."""
        test, net = generated(self, 0), list(model.values())
        rows = np.concatenate([deal_out(self)[node] for node in slow])
        return accuracies(
            forward(net, test.inputs)[1], test.labels, generated(self, 1).labels[rows]
        )


@lru_cache(maxsize=16)
def generated(task: SmallTask, split: int) -> Labelled:
    centres = np.random.default_rng([task.seed, 2]).standard_normal((CLASSES, GROUPS, DIM))
    rng = np.random.default_rng([task.seed, 3, split])
    # all classes equally often, so that only the partition makes nodes differ
    labels = np.arange(task.num_nodes * task.examples if split else TEST) % CLASSES
    chosen = centres[labels, rng.integers(GROUPS, size=len(labels))]
    return Labelled(chosen + NOISE * rng.standard_normal((len(labels), DIM)), labels)


@lru_cache(maxsize=8)
def deal_out(task: SmallTask) -> list[Rows]:
    labels = generated(task, 1).labels
    return partition_rows(labels, task.num_nodes, task.partition, seed=task.seed)


def client_app(task: SmallTask) -> ClientApp:
    app = ClientApp()

    def opened(message: Message, context: Context) -> tuple[Labelled, int, UniformSampler]:
        node = int(context.node_config[keys.PARTITION_ID])
        own = generated(task, 1).at(deal_out(task)[node])
        entropy = [task.seed, node, in_config(message, keys.SERVER_ROUND), *repeat_of(message)]
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        sampler = UniformSampler(len(own), task.batch_size, seed=seed)
        return own, in_config(message, keys.NUM_STEPS) or len(sampler), sampler

    def work(own: Labelled, steps: int, processed: int) -> MetricRecord:
        metrics = {keys.NUM_EXAMPLES: len(own), keys.NUM_STEPS: steps}
        return MetricRecord({**metrics, keys.EXAMPLES_PROCESSED: processed})

    @app.train()
    def train(message: Message, context: Context) -> Message:
        own, steps, sampler = opened(message, context)
        net = network_of(message.content.array_records["arrays"])
        done = train_numpy(net, own, sampler, steps, task.learning_rate)
        metrics = work(own, steps, done.examples_processed)
        metrics[keys.LOSS_RMS] = done.loss_rms
        return Message(RecordDict({"arrays": record_of(net), "metrics": metrics}), reply_to=message)

    @app.train("profile")
    def profile(message: Message, context: Context) -> Message:
        # counted, not trained: an emulated device takes the time
        own, steps, _ = opened(message, context)
        return Message(RecordDict({"metrics": work(own, steps, len(own))}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        own, *_ = opened(message, context)
        net = network_of(message.content.array_records["arrays"])
        right = float((forward(net, own.inputs)[1].argmax(1) == own.labels).mean())
        metrics = MetricRecord({keys.NUM_EXAMPLES: len(own), "eval-acc": right})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app

"""Ways to use the data of nodes that have memory for a third of what the whole model needs.

20 nodes, of which the last twelve are small; all train in each round.
"""

import random
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import nn

from flwr_hetero import keys
from flwr_hetero.arrays import array_of, view_array
from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero.exchange.aggregate import model_of, weight_of, weighted_mean
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import emulated_device
from flwr_hetero.records import payload_bytes
from flwr_hetero_studies.core import curves, record
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.partial import part
from flwr_hetero_studies.race.network import Rows
from flwr_hetero_studies.race.node import Learning
from flwr_hetero_studies.race.node import deal as race_deal
from flwr_hetero_studies.tasks import Examples
from flwr_hetero_studies.tasks.node import seed_of
from flwr_hetero_studies.tasks.training import train

NODES = 20
LARGE = 8
OWN = 3
"""Classes, the last ones, that the small nodes alone hold where classes go by memory."""
TUNING_SEED = 100
RATES = (0.03, 0.06, 0.12)
NEXT_RATE = 0.24
"""Is also tried where the last rate is the best one."""
LAST = 5
"""Measurements at the end of a run of which the mean counts."""
EVERY = 4
BY_MEMORY = "classes-by-memory"
PARTITIONS = (BY_MEMORY, "dirichlet")
SETTINGS = {"rounds": 20, "train-examples": 4000}
FAST = {"rounds": 2, "train-examples": 600}
FAST_CASES = [f"*, {BY_MEMORY}/*"]
HELD_BACK = 2000
"""Examples to tune with, of the training data, and as many to test with."""


class Method(NamedTuple):
    """What nodes train: a model, and how the small ones differ."""

    model: str = "whole"
    small_nodes: bool = True
    last_blocks: bool = False
    small_batch: bool = False


METHODS = {
    "all train all": Method(),
    "small nodes left out": Method(small_nodes=False),
    "narrower model": Method("narrow"),
    "smaller images": Method("halved"),
    "part: last blocks": Method(last_blocks=True),
    "smaller batches": Method(small_batch=True),
}


class PartAverage(FedAvg):
    """Average each array over the nodes that sent it; the others keep their value."""

    def __init__(self) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.arrays = ArrayRecord()
        self.bytes_up = 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.arrays = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord]:
        received = list(replies)
        mean = self.arrays.copy()
        for reply in received:
            if reply.has_error():
                raise RuntimeError(reply.error.reason)
            self.bytes_up += payload_bytes(RecordDict({"arrays": model_of(reply)}))
        for name in mean:
            senders = [reply for reply in received if name in model_of(reply)]
            if senders:
                weights = [weight_of(reply, keys.NUM_EXAMPLES) for reply in senders]
                values = [view_array(model_of(reply)[name]) for reply in senders]
                mean[name] = array_of(weighted_mean(values, weights))
        return mean, MetricRecord()


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    shared = dict(options.settings)
    tuning = {"experiment": f"tuning, {options.data}, {PARTITIONS[0]}", **shared}
    tuned = [line for line in lines if line["seed"] == TUNING_SEED]
    for name in METHODS:
        tried = record.of(tuned, **tuning, name=name)
        rates = options.pick(RATES[:1], RATES)
        if len(tried) >= len(RATES) and best_rate(tried[: len(RATES)]) == RATES[-1]:
            rates = (*RATES, NEXT_RATE)
        for rate in rates:
            given = {"partition": PARTITIONS[0], "split": "valid"}
            yield Trial({**tuning, "name": name, "rate": rate}, TUNING_SEED, given)
        if len(tried) < len(rates):
            continue
        rate = best_rate(tried)
        for seed in options.seeds_or(range(3)):
            for partition in PARTITIONS:
                case = {"experiment": f"{options.data}, {partition}", "name": name, "rate": rate}
                yield Trial(case | shared, seed, {"partition": partition})


def best_rate(lines: list[Line]) -> float:
    """Return the rate with the best validation accuracy on all classes."""
    best = max(lines, key=lambda line: curves.last(line, "accuracy", LAST))
    return float(best["case"]["rate"])


@lru_cache(maxsize=2)
def deal(learning: Learning) -> list[Rows]:
    """Return the rows of each node; by memory, all have as many, and the large ones come first."""
    if learning.partition != BY_MEMORY:
        return race_deal(learning)
    rng = np.random.default_rng(learning.seed)
    labels = learning.splits["train"].labels
    rows = rng.permutation(len(labels))
    is_own = labels[rows] > labels.max() - OWN
    common = rows[~is_own]
    cut = len(rows) * LARGE // NODES
    small = rng.permutation(np.concatenate([rows[is_own], common[cut:]]))
    return [*np.split(common[:cut], LARGE), *np.array_split(small, NODES - LARGE)]


def client_app(learning: Learning, method: Method) -> ClientApp:
    app = ClientApp(mods=[emulated_device])
    build = getattr(part, method.model)
    shape = learning.shape

    @app.train()
    def train_node(message: Message, context: Context) -> Message:
        node = int(context.node_config[keys.PARTITION_ID])
        state = model_of(message).to_torch_state_dict()
        model, batch = assignment(method, part.load(build, state, *shape), shape, node)
        rows = deal(learning)[node]
        # BatchNorm cannot train on a last batch of one image.
        if len(rows) % batch == 1:
            rows = rows[:-1]
        inputs, labels = map(torch.from_numpy, learning.splits["train"].at(rows))
        seed = seed_of(message, learning.seed, node)
        sampler = UniformSampler(len(labels), batch, seed=seed)
        rate = float(context.run_config["learning-rate"])
        examples = Examples(inputs, labels)
        steps = len(sampler)
        train(model, examples, sampler, num_steps=steps, lr=rate, momentum=part.MOMENTUM)
        metrics = MetricRecord({keys.NUM_EXAMPLES: len(labels)})
        arrays = ArrayRecord(model.trained_state())
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def assignment(
    method: Method, model: nn.Sequential, inputs: tuple[part.Shape, int], node: int
) -> tuple[part.Part, int]:
    """Return what a node trains, and its batch; ``inputs``: their shape and number of classes."""
    trained = None
    batch = part.BATCH
    if node >= LARGE and method.last_blocks:
        trained = part.last_blocks(*inputs)
    if node >= LARGE and method.small_batch:
        batch = part.small_batch(*inputs)
    return part.Part(model, trained), batch


def run(case: Case, seed: int, data: Data, partition: str, split: str = "test") -> dict[str, Any]:
    method = METHODS[case["name"]]
    rows = (case["train-examples"], HELD_BACK, HELD_BACK)
    source = data.first(rows[0] + rows[1], rows[2])
    model_name = f"{part.__name__}:{method.model}"
    learning = Learning(source, model_name, partition, NODES, rows, seed)
    count = NODES if method.small_nodes else LARGE
    config = {"learning-rate": case["rate"]}
    devices = [DeviceProfile(1.0)] * count
    grid = LocalGrid(client_app(learning, method), devices, seed=seed, run_config=config)
    test = learning.splits[split]
    is_own = test.labels > test.labels.max() - OWN
    points: list[dict[str, Any]] = []

    def measure(server_round: int, arrays: ArrayRecord) -> None:
        if server_round % EVERY == 0 or server_round > case["rounds"] - LAST:
            model = {name: array.numpy() for name, array in arrays.items()}
            right = learning.predict(model, test.inputs).argmax(1) == test.labels
            point = {"round": server_round, "accuracy": float(right.mean())}
            points.append(point | {"own": float(right[is_own].mean())})

    strategy = PartAverage()
    random.seed(seed)
    strategy.start(grid, learning.first(), case["rounds"], evaluate_fn=measure)
    metrics = {"bytes_up": strategy.bytes_up, **memory(method, learning)}
    return {"metrics": metrics, "curve": curves.rounded(curves.columns(points))}


def memory(method: Method, learning: Learning) -> dict[str, Any]:
    """Measure in bytes what a step of a small node takes.

    ``last`` is what the last blocks need, from each block on, and ``alone`` what each one needs.
    """
    image, num_classes = learning.shape
    # Without small nodes, the large ones are measured.
    node = NODES - 1 if method.small_nodes else 0
    network = getattr(part, method.model)(image, num_classes)
    model, batch = assignment(method, network, learning.shape, node)
    whole = part.whole(image, num_classes)
    places = range(len(whole))
    return {
        "need": part.need_bytes(model, image, batch),
        "peak": part.peak_bytes(model, image, batch),
        "budget": round(part.budget(image, num_classes)),
        "whole_peak": part.peak_bytes(part.Part(whole), image, part.BATCH),
        "last": [part.need_bytes(part.Part(whole, {*places[first:]}), image) for first in places],
        "alone": [part.need_bytes(part.Part(whole, {place}), image) for place in places],
    }

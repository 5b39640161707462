"""A fleet with nodes that lie, and the nests of wrappers that they attack."""

import random
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from composition_toy import composition_app
from flwr.app import Array, ArrayRecord
from recording import Folder, History
from toy import FLOWER_STRATEGIES

from flwr_hetero import strategy as ours
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero_studies import rivals
from flwr_hetero_studies.core.quiet import only_errors

FLEET = [DeviceProfile(speed, jitter=0.1) for speed in (4.2, 4.1, 4.0, 1.2, 1.1, 1.0)]
STEPS = {"fast_steps": 6}
PHASE = {"profiling": "phase", "sync_rounds": 1, "warmup_rounds": 0}


def leaf(name="FedAvg", **settings):
    """One of Flower's strategies, that does not evaluate if not told otherwise."""
    return FLOWER_STRATEGIES[name](**{"fraction_evaluate": 0.0} | settings)


def recorded(inner):
    return ours.Recorded(inner, run_dir=Folder())


def everything(inner):
    """Nest what goes together in rounds."""
    inner = ours.SamplerMetrics(ours.CDGraB(inner, sketch_size=2))
    inner = ours.Resharding(ours.BiasedLocalSGD(inner, **STEPS), share=0.5, budget_bytes=16)
    return recorded(ours.TiFL(inner, 6, 1, interval=1, **PHASE))


def merged(inner):
    """Nest what goes together without rounds."""
    steps = ours.LocalSteps(inner, budget="deadline", **STEPS)
    return recorded(ours.SamplerMetrics(ours.FedBuff(steps, buffer_size=6)))


NESTS = {
    "none": lambda inner: ours.Wrapper(inner),
    "TiFL": lambda inner: ours.TiFL(inner, 6, 1, interval=1),
    "TiFL phase": lambda inner: ours.TiFL(inner, 6, 1, interval=1, **PHASE),
    "BiasedLocalSGD": lambda inner: ours.BiasedLocalSGD(inner, **STEPS),
    "LocalSteps": lambda inner: ours.LocalSteps(inner, budget="deadline", **STEPS),
    "AdaComm": lambda inner: rivals.AdaComm(inner, 6, interval_s=0.0),
    "CDGraB": lambda inner: ours.CDGraB(inner, sketch_size=2),
    "Resharding": lambda inner: ours.Resharding(inner, share=0.5, budget_bytes=16),
    "SamplerMetrics": lambda inner: ours.SamplerMetrics(inner),
    "Compressed": lambda inner: ours.Compressed(inner),
    "RandomSelection": lambda inner: ours.RandomSelection(inner, 6),
    "FedBuff": lambda inner: ours.FedBuff(inner, buffer_size=6),
    "Recorded": recorded,
    "everything": everything,
    "merged": merged,
}
"""Every wrapper alone, and two legal nests of all that goes together."""
RIVAL_NESTS = {
    "Oort": lambda inner: rivals.Oort(inner, 6, profiling=True),
    "PowerOfChoice": lambda inner: rivals.PowerOfChoice(inner, 6),
    "DeadlineSelection": lambda inner: rivals.DeadlineSelection(inner, deadline_s=100.0),
    "FedAsync": lambda inner: rivals.FedAsync(inner),
    "FedAT": lambda inner: rivals.FedAT(inner, 6, 1),
    "FedCompass": lambda inner: rivals.FedCompass(inner, 2, 4),
}
BY_NIGHT = [
    nest if nest in ("everything", "merged") else pytest.param(nest, marks=pytest.mark.nightly)
    for nest in NESTS
]
"""The same; the last two hold all others, which alone have their turn at night."""


class LyingGrid(LocalGrid):
    """Nodes, by partition, rewrite their replies after the grid has timed them."""

    def __init__(self, app, profiles, lies):
        super().__init__(app, profiles)
        self.lies = lies

    def _answer(self, message):
        arrival_s, reply = super()._answer(message)
        lie = self.lies.get(message.metadata.dst_node_id - 1000)
        if lie is not None and reply is not None and reply.has_content():
            reply = lie(message, reply) or reply
        return arrival_s, reply


def trained(lie, rounds=range(1, 10**9)):
    """Tell the lie in replies to training, in these rounds only."""

    def when(message, reply):
        number = int(message.content["config"].get("server-round", 0))
        if message.metadata.message_type == "train" and number in rounds:
            return lie(message, reply)
        return None

    return when


def start(size=3):
    return ArrayRecord({"w": Array(np.zeros(size, np.float32))})


def run(
    strategy, lies, *, rounds=3, profiles=FLEET, app=None, arrays=None, grid=LyingGrid, logs=False
):
    """Run among liars; return the records after the first, the models of all rounds, the result."""
    random.seed(3)
    history = strategy if isinstance(strategy, ours.Recorded) else History(strategy)
    records = history.run_dir.records if isinstance(strategy, ours.Recorded) else history.records
    models = []

    def watch(number, arrays):
        models.append(ArrayRecord(deepcopy(dict(arrays))))

    with nullcontext() if logs else only_errors(), TemporaryDirectory() as folder:
        if isinstance(history, ours.Recorded):
            history.run_dir.checkpoint_dir = Path(folder)
        fleet = grid(app or composition_app(), profiles, lies)
        result = history.start(fleet, arrays or start(), rounds, evaluate_fn=watch)
    return records[1:], models, result


def attack(strategy, lies, **settings):
    """Run among liars; return the records after the first, and the values of all models."""
    records, models, _ = run(strategy, lies, **settings)
    return records, np.array([model["w"].numpy() for model in models])


def names_of(partition):
    """Name a node, before and after it is known."""
    return {f"node-{partition}", f"id-{1000 + partition}"}


def reasons(records, partition):
    """Return what the history says of a node's failures."""
    failures = [failure for record in records for failure in record["failures"]]
    return [f["reason"] for f in failures if f["node"] in names_of(partition)]

"""Soak: 1,000 nodes, 2,000 rounds, 5 % faults of every kind in each; memory must stay flat.

Everything at once on a LocalGrid, in rounds or without (``STRATEGIES``), with a model of 5 numbers
so that what is seen is the machinery's own memory. In every round, or between two merges, six
kinds of trouble strike 5 % of the nodes each, no node twice: it never answers, answers with an
error, answers too late, sends garbage (every kind of it in turn), claims what is not so (steps,
latency, order), has left the fleet. 5 % of the nodes evaluate; in rounds all nodes are profiled
again every 250. A run in rounds lasts longer than messages live (12 hours).

The curve has a point every ten rounds.
"""

import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam

from flwr_hetero import keys
from flwr_hetero.fleet import Fault, LocalGrid, named_fleet
from flwr_hetero.fleet.faults import CORRUPTIONS
from flwr_hetero.mod import load_state, save_state
from flwr_hetero.sampler import OrderedSampler
from flwr_hetero.strategy import (
    BiasedLocalSGD,
    CDGraB,
    FedBuff,
    LocalSteps,
    OverSelect,
    Recorded,
    TiFL,
    Wrapper,
)
from flwr_hetero_studies.core.curves import columns
from flwr_hetero_studies.faults.storage import PagelessRun

DIM, EXAMPLES, BATCH = 5, 8, 2
ASKED, TAKEN = 40, 24
SHARE = 0.05
TIMEOUT_S = 120.0
SECONDS_PER_EXAMPLE = 1.0
EVERY = 10
KINDS = ("error", "false claim", "garbage", "late", "never answers")
LIES: dict[int, str] = {}
"""Partition to what it claims in the round that is running."""


def lie(message: Message, context: Context, call_next: Any) -> Message:
    """Spoil what a node claims, if it is its turn."""
    reply = call_next(message, context)
    claim = LIES.get(int(context.node_config[keys.PARTITION_ID]))
    if claim == "steps":
        reply.content["metrics"][keys.NUM_STEPS] = 10**9
    elif claim == "latency":
        reply.content["metrics"][keys.TRAIN_TIME] = 1e9
    elif claim == "order" and keys.ORDER in reply.content:
        reply.content[keys.ORDER][keys.VERSION] = 2**63 - 1
    return reply


app = ClientApp(mods=[lie])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Least squares on eight examples, visited in the order that the server wants."""
    partition = int(context.node_config[keys.PARTITION_ID])
    rng = np.random.default_rng(partition)
    inputs = rng.standard_normal((EXAMPLES, DIM))
    targets = inputs.sum(axis=1) + 0.1 * partition / 1000
    sampler = OrderedSampler(EXAMPLES, BATCH, seed=partition, method="cd-grab")
    if state := load_state(context, "order"):
        sampler.load_state_dict(state)
    sampler.follow(message.content.config_records.get(keys.ORDER, {}))
    w = message.content["arrays"]["w"].numpy()
    steps = int(message.content["config"].get(keys.NUM_STEPS, 4))
    for _ in range(steps):
        chosen, weights = sampler.next_batch()
        step = (weights * (inputs[chosen] @ w - targets[chosen])) @ inputs[chosen] / len(chosen)
        sampler.observe(torch.from_numpy(step[None].astype(np.float32)))
        w = w - np.float32(0.05) * step.astype(np.float32)
    save_state(context, "order", sampler.state_dict())
    metrics = {"num-examples": EXAMPLES, "num-steps": steps, "examples-processed": steps * BATCH}
    content = RecordDict({"arrays": ArrayRecord({"w": Array(w)}), "metrics": MetricRecord(metrics)})
    if report := sampler.report():
        content[keys.ORDER] = ConfigRecord(report)
    return Message(content, reply_to=message)


@app.train("profile")
def profile(message: Message, context: Context) -> Message:
    """Say how much work a round is."""
    metrics = MetricRecord({"num-examples": EXAMPLES, "examples-processed": 8.0})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Say how far the model is from the truth."""
    error = float(np.abs(message.content["arrays"]["w"].numpy() - 1).mean())
    metrics = MetricRecord({"num-examples": EXAMPLES, "eval-loss": error})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


class Trouble(Wrapper):
    """Spread each round's faults over the fleet, and write down how the run is."""

    name = "trouble"

    def __init__(self, strategy: Wrapper, grid: LocalGrid) -> None:
        super().__init__(strategy)
        self.grid, self.nodes = grid, list(grid.get_node_ids())
        self.each = max(1, round(SHARE * len(self.nodes)))
        self.points: list[dict[str, Any]] = []
        self.rng = np.random.default_rng(0)
        self.garbage, self.claims = cycle(sorted(CORRUPTIONS)), cycle(["steps", "latency", "order"])
        self.away: list[int] = []
        self.kind_of: dict[int, str] = {}
        self.struck: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.start_s = time.monotonic()

    def strike(self) -> None:
        """Inject faults; those of the last round end."""
        for node_id in self.away:
            self.grid.come_back(node_id)
        chosen = self.rng.permutation(len(self.nodes))[: 6 * self.each].reshape(6, -1).tolist()
        dies, errs, late, garbage, lies, away = chosen
        self.grid.faults = [
            *(Fault(i, "dies", message_type="train") for i in dies),
            *(Fault(i, "errs", message_type="train") for i in errs),
            *(Fault(i, "late", delay_s=2 * TIMEOUT_S, message_type="train") for i in late),
            *(Fault(i, "garbage", corrupt=next(self.garbage), message_type="train")
              for i in garbage),
        ]  # fmt: skip
        # one process: the ClientApp reads it when its node trains
        LIES.clear()
        LIES.update({i: next(self.claims) for i in lies})
        self.away = [self.nodes[i] for i in away]
        for node_id in self.away:
            self.grid.leave(node_id)
        kinds = zip(KINDS, (errs, lies, garbage, late, dies), strict=True)
        self.kind_of = {i: kind for kind, own in kinds for i in own}

    def on_instructions(self, context: Any, messages: list[Message], grid: Any) -> list[Message]:
        """Count who is asked, and who of them is in trouble."""
        partitions = [self.nodes.index(message.metadata.dst_node_id) for message in messages]
        self.struck.update(self.kind_of[i] for i in partitions if i in self.kind_of)
        self.seen["nodes asked"] += len(partitions)
        return messages

    def on_round_end(self, run: Any, record: dict[str, Any]) -> None:
        """Count, measure the memory of this process every few rounds, and strike again."""
        # between two rounds, so that a fault lasts for one
        self.strike()
        if not record["round"]:
            return
        self.seen["failures"] += len(record["failures"])
        self.seen["rounds without result"] += not record["train"]
        if record["round"] % EVERY == 0 or record["round"] == 1:
            # of the whole process: what Flower and torch keep counts too
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            point = {
                "round": record["round"],
                "resident_mb": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 2),
                "virtual_h": round(record["virtual_s"] / 3600, 3),
                "wall_s": round(time.monotonic() - self.start_s, 1),
                "error": record["evaluate"].get("eval-loss"),
                "pending": len(self.grid.traffic.pending),
            }
            struck = {f"struck: {kind}": self.struck[kind] for kind in KINDS}
            self.points.append(point | self.seen | struck)


def leaf() -> FedAdam:
    """Aggregate."""
    return FedAdam(eta=0.02, fraction_evaluate=SHARE)


def rounds() -> Wrapper:
    """Nest what goes together in rounds."""
    inner = BiasedLocalSGD(CDGraB(leaf(), sketch_size=4), fast_steps=8)
    phases = {"profiling": "phase", "profile_interval": 250, "sync_rounds": 1}
    return OverSelect(TiFL(inner, ASKED, 5, **phases), take=TAKEN)


def merges() -> Wrapper:
    """Nest what goes together without rounds."""
    return FedBuff(LocalSteps(leaf(), fast_steps=8, budget="slice"), concurrency=ASKED)


STRATEGIES: dict[str, Callable[[], Wrapper]] = {"rounds": rounds, "merges": merges}


def run(name: str, num_rounds: int, num_nodes: int) -> dict[str, Any]:
    """Run the soak; the metrics are those of its last point."""
    logging.disable()
    fleet = named_fleet("paper-5", num_nodes)
    fleet = [replace(device, seconds_per_example=SECONDS_PER_EXAMPLE) for device in fleet]
    grid = LocalGrid(app, fleet)
    trouble = Trouble(STRATEGIES[name](), grid)
    arrays = ArrayRecord({"w": Array(np.zeros(DIM, np.float32))})
    with tempfile.TemporaryDirectory() as folder:
        run_dir = PagelessRun(str(Path(folder) / "run"), {})
        Recorded(trouble, run_dir=run_dir, checkpoint_every=50).start(
            grid, arrays, num_rounds, timeout=TIMEOUT_S
        )
    logging.disable(logging.NOTSET)
    return {"metrics": trouble.points[-1], "curve": columns(trouble.points)}

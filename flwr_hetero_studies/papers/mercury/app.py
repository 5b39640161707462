"""Mercury as a Flower app of the studies: importance sampling and resharding, on a run-config.

A node trains on important samples, and scores the next ones while it waits.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.client.timing import read_pace
from flwr_hetero.errors import invalid
from flwr_hetero.mercury.resharding import NodeShard, offer, pack, unpack
from flwr_hetero.mercury.sampler import ESTIMATORS
from flwr_hetero.mercury.scoring import collect_hidden, score_hidden
from flwr_hetero.mod import emulated_device, restore, save_state
from flwr_hetero.sampler import MercurySampler
from flwr_hetero.strategy import Resharding, SamplerMetrics
from flwr_hetero_studies.tasks import Examples, Settings
from flwr_hetero_studies.tasks.node import NodeTask, evaluate_node, open_node, profile_node

SAMPLING = ("bacc", "uniform")
RESHARDING = ("off", "importance", "random")
STATE = "mercury"
KNOWN_SHARE = 0.5
"""Part of its samples that a node must have scored before it offers some by importance."""


@dataclass(frozen=True)
class MercurySettings(Settings):
    """The run-config of the app."""

    sampling: str = "bacc"
    estimator: str = "flat"
    local_steps: int = 5
    resharding: str = "off"
    reshard_share: float = 0.2
    reshard_budget: int = 100_000

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("sampling", SAMPLING)
        self.check_choice("estimator", ESTIMATORS)
        self.check_choice("resharding", RESHARDING)
        if self.resharding == "importance" and self.sampling == "uniform":
            rule = "go with a sampling that finds out importance"
            raise invalid("resharding", self.resharding, rule, "use random with uniform sampling")

    def strategy(self) -> Strategy:
        """Make FedAvg, with resharding around it where it is asked for."""
        strategy: Strategy = FedAvg(fraction_evaluate=0.0)
        if self.resharding != "off":
            if not isinstance(self.shape[1], int):
                hint = "only examples with a label can be exchanged"
                raise invalid("resharding", self.resharding, "be off with this task", hint)
            strategy = Resharding(
                strategy,
                share=self.reshard_share,
                budget_bytes=self.reshard_budget,
                by_importance=self.resharding == "importance",
                seed=self.seed,
            )
        return strategy if self.sampling == "uniform" else SamplerMetrics(strategy)


app = ClientApp(mods=[emulated_device])
app.train("profile")(profile_node)
app.evaluate()(evaluate_node)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train as ``sampling`` says; take in and offer samples if the server reshards."""
    settings = MercurySettings.from_run_config(context.run_config)
    node = open_node(message, context)
    shard = NodeShard.open(message, context)
    if shard is not None:
        node = replace(node, examples=with_others(node, shard))
    sampler = open_sampler(node, settings, context, shard)
    model = node.model()
    examples = (node.examples.inputs, node.examples.targets)
    hidden = 0
    if settings.sampling == "uniform":
        result = node.train(model, node.sampler())
    else:
        result = node.train(model, sampler)
        hidden = score_hidden(model, examples, context, sampler, node.losses)
    reply = node.reply(model, result)
    reply.content.metric_records["metrics"][keys.EXAMPLES_HIDDEN] = hidden
    if settings.sampling != "uniform":
        reply.content[keys.SAMPLER] = sampler_stats(sampler, context, hidden)
    if shard is not None:
        offer_samples(reply, context, node.examples, shard, sampler)
    save_state(context, STATE, sampler.state_dict())
    return reply


def sampler_stats(sampler: MercurySampler, context: Context, hidden: int) -> ConfigRecord:
    """Describe the sampling, and how much of the time for scoring the network hides."""
    stats: dict[str, Any] = {"samples-scored": hidden, **sampler.summary()}
    pace = read_pace(context)
    if pace is not None and hidden:
        hidden_s = min(hidden * pace.score_s, pace.idle_s)
        stats["hidden-share"] = hidden_s / (hidden * pace.score_s)
    return ConfigRecord(stats)


def open_sampler(
    node: NodeTask, settings: MercurySettings, context: Context, shard: NodeShard | None
) -> MercurySampler:
    """Continue the sampler where the last round left it, if its state is there."""
    sampler = MercurySampler(
        len(node.examples),
        settings.batch_size,
        seed=node.seed,
        estimator=settings.estimator,
        scores="loss",
    )
    restore(sampler, context, STATE)
    collect_hidden(sampler, context)
    if shard is not None and not shard.missing:
        sampler.forget(np.array(shard.fresh, dtype=np.int64))
    return sampler


def with_others(node: NodeTask, shard: NodeShard) -> Examples:
    """Put other nodes' samples into their slots; leave out those that have not arrived."""
    inputs = node.examples.inputs
    targets = node.examples.targets
    if shard.held:
        slots = list(shard.held)
        content = b"".join(shard.held.values())
        shape, num_classes = node.settings.shape
        assert isinstance(num_classes, int), "only examples with a label are exchanged"
        new_inputs, new_targets = unpack(content, shape, num_classes)
        inputs = inputs.clone()
        targets = targets.clone()
        inputs[slots] = torch.from_numpy(new_inputs).to(inputs.dtype)  # token numbers are whole
        targets[slots] = torch.from_numpy(new_targets)
    if shard.missing:
        keep = np.setdiff1d(np.arange(len(targets)), shard.missing)
        inputs = inputs[keep]
        targets = targets[keep]
    return replace(node.examples, inputs=inputs, targets=targets)


def offer_samples(
    reply: Message, context: Context, examples: Examples, shard: NodeShard, sampler: MercurySampler
) -> None:
    """Add samples to the reply, the important ones first: RAW SAMPLES LEAVE THE DEVICE."""

    def choose(count: int, by_importance: bool) -> NDArray[np.int64] | None:
        if by_importance and sampler.coverage < KNOWN_SHARE:
            return None  # later, when importance is known
        importance = sampler.importance if by_importance else np.ones(sampler.num_samples)
        return offer(importance, sampler.groups, count, sampler.rng)

    slots: list[int] = []
    if not shard.missing:  # else slots are not positions in the examples
        sample_bytes = 4 * examples.inputs[0].numel() + 8
        slots = shard.offers(len(examples), sample_bytes, choose)
    content = pack(examples.inputs[slots].numpy(), examples.targets[slots].numpy())
    shard.close(reply, context, slots, content)

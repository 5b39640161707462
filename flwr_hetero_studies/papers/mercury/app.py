"""Mercury's resharding as an app: nodes train on important samples, and exchange some of them."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.errors import invalid
from flwr_hetero.mercury.resharding import NodeShard, offer, pack, unpack
from flwr_hetero.mod import emulated_device, restore, save_state
from flwr_hetero.sampler import MercurySampler
from flwr_hetero.strategy import Resharding, SamplerMetrics
from flwr_hetero_studies.tasks import Examples, Settings
from flwr_hetero_studies.tasks.node import NodeTask, evaluate_node, open_node

STATE = "mercury"
KNOWN_SHARE = 0.5
"""Part of its samples that a node must have scored before it offers some by importance."""


@dataclass(frozen=True)
class MercurySettings(Settings):
    """The run-config of the app."""

    resharding: str = "importance"
    reshard_share: float = 0.2
    reshard_budget: int = 100_000

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("resharding", ("importance", "random"))

    def strategy(self) -> Strategy:
        if not isinstance(self.shape[1], int):
            raise invalid("task", self.task, "be classification: examples need a label")
        strategy = Resharding(
            FedAvg(fraction_evaluate=0.0),
            share=self.reshard_share,
            budget_bytes=self.reshard_budget,
            by_importance=self.resharding == "importance",
            seed=self.seed,
        )
        return SamplerMetrics(strategy)


app = ClientApp(mods=[emulated_device])
app.evaluate()(evaluate_node)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on important samples; take in and offer some if the server reshards."""
    node = open_node(message, context)
    shard = NodeShard.open(message, context)
    if shard is not None:
        node = replace(node, examples=with_others(node, shard))
    size = node.settings.batch_size
    sampler = MercurySampler(len(node.examples), size, seed=node.seed, scores="loss")
    restore(sampler, context, STATE)
    if shard is not None and not shard.missing:
        # Scores of the samples that were here before do not hold for the new ones.
        sampler.forget(np.array(shard.fresh, dtype=np.int64))
    model = node.model()
    reply = node.reply(model, node.train(model, sampler))
    reply.content[keys.SAMPLER] = ConfigRecord(dict(sampler.summary()))
    if shard is not None:
        offer_samples(reply, context, node.examples, shard, sampler)
    save_state(context, STATE, sampler.state_dict())
    return reply


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
        # Numbers of tokens are whole.
        inputs[slots] = torch.from_numpy(new_inputs).to(inputs.dtype)
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
            # Offer some later, when importance is known.
            return None
        importance = sampler.importance if by_importance else np.ones(sampler.num_samples)
        return offer(importance, sampler.groups, count, sampler.rng)

    slots: list[int] = []
    # While samples are missing, slots are not positions in the examples.
    if not shard.missing:
        sample_bytes = 4 * examples.inputs[0].numel() + 8
        slots = shard.offers(len(examples), sample_bytes, choose)
    content = pack(examples.inputs[slots].numpy(), examples.targets[slots].numpy())
    shard.close(reply, context, slots, content)

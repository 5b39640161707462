"""What a node does: draw its batches as the run-config says, and tell what each part needs."""

from contextlib import ExitStack

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import Tensor, nn

from fleet_app.task import RESHUFFLE, TOP_LOSS, FleetSettings
from flwr_hetero import keys
from flwr_hetero.cd_grab.gradients import batch_gradient
from flwr_hetero.client.batch_sampler import BatchSampler
from flwr_hetero.client.device import reading_cost
from flwr_hetero.mercury.scoring import collect_hidden, score_hidden
from flwr_hetero.mod import emulated_device, follow
from flwr_hetero.sampler import (
    MercurySampler,
    OrderedSampler,
    PGDSampler,
    PriorityFeed,
    TopLossSampler,
)
from flwr_hetero_studies.tasks.node import NodeTask, evaluate_node, open_node, profile_node
from flwr_hetero_studies.tasks.training import pick_device

STATE = "fleet"

app = ClientApp(mods=[emulated_device])
app.train("profile")(profile_node)
app.evaluate()(evaluate_node)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on what the sampler draws; report what it saw."""
    settings = FleetSettings.from_run_config(context.run_config)
    node = open_node(message, context)
    model = node.model().to(pick_device(node.settings.device))
    with ExitStack() as stack:
        sampler = make_sampler(node, settings, context, model, stack)
        follow(sampler, message, context, model, STATE)
        if isinstance(sampler, MercurySampler):
            collect_hidden(sampler, context)

        def watch(model: nn.Module, indices: NDArray[np.int64], losses: Tensor) -> int:
            if isinstance(sampler, OrderedSampler) and sampler.watching:
                sampler.observe(batch_gradient(model))
                return reading_cost(len(indices))
            fed = isinstance(sampler, PriorityFeed)
            return sampler.on_batch(model, indices, losses) if fed else 0

        reply = node.reply(model, node.train(model, sampler, watch))
        report(sampler, reply, model, node, context)
    return reply


def make_sampler(
    node: NodeTask, settings: FleetSettings, context: Context, model: nn.Module, stack: ExitStack
) -> BatchSampler:
    """Make the sampler that the run-config names, or the order."""
    sizes = len(node.examples), settings.batch_size
    if settings.order != RESHUFFLE:
        # An order is learned over the whole run, so its seed must not depend on the round.
        identity = [settings.seed, int(context.node_config[keys.PARTITION_ID])]
        return OrderedSampler(
            *sizes,
            num_units=min(settings.num_units, len(node.examples)) or None,
            method=settings.order,
            seed=int(np.random.SeedSequence(identity).generate_state(1)[0]),
        )
    if settings.sampler == TOP_LOSS:
        return TopLossSampler(*sizes, seed=node.seed)
    if settings.sampler == "mercury":
        return MercurySampler(*sizes, seed=node.seed, scores="loss")
    if settings.sampler == "pgd":
        return stack.enter_context(PriorityFeed(PGDSampler(*sizes, seed=node.seed), model))
    return node.sampler()


def report(
    sampler: BatchSampler, reply: Message, model: nn.Module, node: NodeTask, context: Context
) -> None:
    """Add to the reply what the server wants to know of a sampler."""
    if isinstance(sampler, MercurySampler):
        examples = node.examples.inputs, node.examples.targets
        hidden = score_hidden(model, examples, context, sampler, node.losses)
        reply.content["metrics"][keys.EXAMPLES_HIDDEN] = hidden
    names = {MercurySampler: "mercury", PriorityFeed: "pgd"}
    if isinstance(sampler, (MercurySampler, PriorityFeed)):
        name = names[type(sampler)]
        facts = dict(reply.content.config_records.get(keys.SAMPLER, {}))
        facts |= {f"{name}-{key}": value for key, value in sampler.summary().items()}
        reply.content[keys.SAMPLER] = ConfigRecord(facts)

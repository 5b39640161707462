"""The node: train on prioritised samples and keep their priorities between rounds."""

from logging import WARNING

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.common.logger import log
from torch import Tensor, nn

from flwr_hetero import keys
from flwr_hetero.mod import emulated_device, restore, save_state
from flwr_hetero.pgd.algorithm import top_share
from flwr_hetero.pgd.priorities import all_priorities
from flwr_hetero.sampler import PGDSampler, PriorityFeed, UniformSampler
from flwr_hetero_studies.tasks.node import NodeTask, evaluate_node, open_node, profile_node
from flwr_hetero_studies.tasks.training import pick_device
from pgd_app.task import TOPS, PGDSettings

STATE = "pgd"

app = ClientApp(mods=[emulated_device])
app.train("profile")(profile_node)
app.evaluate()(evaluate_node)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take the steps of a round by the rule of the run-config."""
    settings = PGDSettings.from_run_config(context.run_config)
    node = open_node(message, context)
    model = node.model().to(pick_device(settings.device))
    stats = look(model, node) if settings.looks_in(node.config.get(keys.SERVER_ROUND, 0)) else {}
    sampler = settings.sampler(len(node.examples), node.seed)
    if isinstance(sampler, UniformSampler):
        reply = node.reply(model, node.train(model, sampler))
    else:
        with open_feed(model, node, sampler, settings, context) as feed:
            reply = node.reply(model, node.train(model, feed, feed.on_batch))
            stats |= feed.summary()
            save_state(context, STATE, feed.state_dict())
    reply.content[keys.SAMPLER] = ConfigRecord(stats)
    return reply


def open_feed(
    model: nn.Module, node: NodeTask, sampler: PGDSampler, settings: PGDSettings, context: Context
) -> PriorityFeed:
    """Continue with sampler and gradient of the last round; start from scratch without them."""
    feed = PriorityFeed(sampler, model, layers=settings.layers)
    if not restore(feed, context, STATE) and settings.full_pass:
        feed.full_pass(model, node.losses, *on_device(model, node))
    return feed


def look(model: nn.Module, node: NodeTask) -> dict[str, float]:
    """Compute all priorities of the node's samples, for the plots; trains nothing."""
    try:
        priorities, _ = all_priorities(model, node.losses, *on_device(model, node))
    except ValueError as error:  # of an LSTM, which has no forward mode
        log(WARNING, "no look at the priorities: %s", error)
        return {}
    relative = priorities / (np.abs(priorities).mean() or 1.0)
    stats = {
        f"priority-over-mean-size.{q}th percentile": float(np.quantile(relative, q / 100))
        for q in (10, 50, 90)
    }
    for top in TOPS:
        stats[f"share-of-loss-decrease.top {top:g} %"] = top_share(priorities, top / 100)
    return stats


def on_device(model: nn.Module, node: NodeTask) -> tuple[Tensor, Tensor]:
    """Return the node's inputs and targets where the model is."""
    examples = node.examples.to(next(model.parameters()).device)
    return examples.inputs, examples.targets

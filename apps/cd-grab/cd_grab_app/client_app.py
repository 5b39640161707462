"""What a node does: visit its data in order, and tell the server what it saw on the way."""

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import Tensor, nn

from cd_grab_app.task import OrderSettings
from flwr_hetero.cd_grab.gradients import batch_gradient, example_gradients
from flwr_hetero.client.device import FORWARD_SHARE, reading_cost
from flwr_hetero.mod import emulated_device, follow
from flwr_hetero_studies.papers.cd_grab.herding import HERDING, HerdingProbe
from flwr_hetero_studies.tasks.node import evaluate_node, lifelong_order, open_node, profile_node

STATE = "order"

app = ClientApp(mods=[emulated_device])
app.train("profile")(profile_node)
app.evaluate()(evaluate_node)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take the steps in order; show the sampler every unit's gradient."""
    settings = OrderSettings.from_run_config(context.run_config)
    node = open_node(message, context)
    model = node.model()
    sampler = lifelong_order(
        node,
        settings,
        context,
        settings.method,
        num_units=settings.num_units,
        unit=settings.unit,
    )
    follow(sampler, message, context, model, STATE)
    probe = HerdingProbe(message.content.config_records.get(HERDING, {}))

    def watch(model: nn.Module, indices: NDArray[np.int64], losses: Tensor) -> int:
        if not (sampler.watching or probe.on):
            return 0
        if settings.unit == "example":
            gradients = example_gradients(model, node.losses, *node.examples.take(indices))
            cost = round(len(indices) / FORWARD_SHARE)  # each forward and backward once more
        else:
            gradients, cost = batch_gradient(model), reading_cost(len(indices))
        sampler.observe(gradients)
        probe.see(gradients)
        return cost if sampler.watching else 0  # the probe is a measurement, not the method

    reply = node.reply(model, node.train(model, sampler, watch))
    if probe.on:
        reply.content[HERDING] = ConfigRecord(probe.report(len(sampler.units)))
    return reply

"""What a node does: visit its data in order, and tell the server what it saw on the way."""

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cd_grab_app.task import OrderSettings
from flwr_hetero import keys
from flwr_hetero.cd_grab.gradients import batch_gradient, example_gradients
from flwr_hetero.mod import emulated_device, restore, save_state
from flwr_hetero.sampler import HerdingProbe, OrderedSampler
from flwr_hetero.task.node import NodeTask, evaluate_node, lifelong_order, open_node, profile_node

STATE = "order"

app = ClientApp(mods=[emulated_device])
app.train("profile")(profile_node)
app.evaluate()(evaluate_node)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take the steps in order; show the sampler every unit's gradient."""
    settings = OrderSettings.from_run_config(context.run_config)
    node = open_node(message, context)
    records = message.content.config_records
    sampler = open_sampler(node, settings, context)
    sampler.follow(records.get(keys.ORDER, {}))
    probe = HerdingProbe(records.get(keys.HERDING, {}))

    def watch(model: nn.Module, indices: NDArray[np.int64], losses: Tensor) -> None:
        if not (sampler.watching or probe.on):
            return
        if settings.unit == "example":
            gradients = example_gradients(model, cross_entropy, *node.examples.take(indices))
        else:
            gradients = batch_gradient(model)
        sampler.observe(gradients)
        probe.see(gradients)

    model = node.model()
    reply = node.reply(model, node.train(model, sampler, watch))
    save_state(context, STATE, sampler.state_dict())
    found = {keys.ORDER: sampler.report(), keys.HERDING: probe.report(len(sampler.units))}
    for name, record in found.items():
        if record:
            reply.content[name] = ConfigRecord(record)
    return reply


def open_sampler(node: NodeTask, settings: OrderSettings, context: Context) -> OrderedSampler:
    """Restore the sampler of the last round; without its state it starts from scratch."""
    sampler = lifelong_order(
        node,
        settings,
        context,
        settings.method,
        num_units=settings.num_units,
        unit=settings.unit,
    )
    restore(sampler, context, STATE)
    return sampler

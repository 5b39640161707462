"""What a node does: its assigned number of steps, on the samples of its class."""

from dataclasses import replace

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from biased_app.task import BiasedSettings, all_examples
from flwr_hetero import keys
from flwr_hetero.biased_local_sgd.shared_data import read_samples, samples_record
from flwr_hetero.mod import emulated_device, restore, save_state
from flwr_hetero.sampler import TopLossSampler
from flwr_hetero.task.node import NodeTask, evaluate_node, open_node, profile_node

STATE = "top-loss"

app = ClientApp(mods=[emulated_device])
app.train("profile")(profile_node)
app.evaluate()(evaluate_node)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take the steps, record the losses, keep them until the next round."""
    settings = BiasedSettings.from_run_config(context.run_config)
    node = open_node(message, context)
    if settings.shared_data:
        node = replace(node, examples=all_examples(settings))
    sampler = open_sampler(node, settings, context)
    model = node.model()
    reply = node.reply(model, node.train(model, sampler))
    save_state(context, STATE, sampler.state_dict())
    if keys.SAMPLES in message.content.config_records:
        reply.content[keys.SAMPLES] = samples_record(*sampler.take_losses())
    return reply


def open_sampler(node: NodeTask, settings: BiasedSettings, context: Context) -> TopLossSampler:
    """Restore the sampler of the last round, in the class that the server assigns.

    Without a class, or with no kept state, the node samples uniformly.
    """
    role = node.config
    fast, share = bool(role.get(keys.FAST, False)), float(role.get(keys.FAST_SHARE, 1.0))
    sampler = TopLossSampler(
        len(node.examples),
        settings.batch_size,
        seed=node.seed,
        high_loss_fraction=float(role.get(keys.HIGH_LOSS_FRACTION, 1.0)),
    )
    samples = node.message.content.config_records.get(keys.SAMPLES)
    if not settings.shared_data:
        restore(sampler, context, STATE)
    sampler.set_role(fast=fast, share=share)
    if samples is not None:
        sampler.assign(read_samples(samples)[0])
    return sampler

"""What a node does: its assigned number of steps, on the samples of its class."""

from dataclasses import replace

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from biased_app.task import BiasedSettings, all_examples
from flwr_hetero import keys
from flwr_hetero.biased_local_sgd.shared_data import read_samples, samples_record
from flwr_hetero.mod import emulated_device, follow
from flwr_hetero.sampler import TopLossSampler
from flwr_hetero_studies.tasks.node import evaluate_node, open_node, profile_node

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
    sampler = TopLossSampler(len(node.examples), settings.batch_size, seed=node.seed, fast=False)
    samples = message.content.config_records.get(keys.SAMPLES)
    if not settings.shared_data:
        follow(sampler, message, context, name=STATE)
    elif samples is not None:
        sampler.assign(read_samples(samples)[0])
    model = node.model()
    reply = node.reply(model, node.train(model, sampler))
    if samples is not None:
        reply.content[keys.SAMPLES] = samples_record(*sampler.take_losses())
    return reply

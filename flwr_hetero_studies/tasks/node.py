"""What a node does with a message: train, profile or evaluate."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import nn

from flwr_hetero import keys
from flwr_hetero.client.batch_sampler import BatchSampler, UniformSampler
from flwr_hetero.client.emulation import in_config, is_emulated
from flwr_hetero.client.timing import in_simulation
from flwr_hetero.client.weighted_loss import Loss
from flwr_hetero.errors import invalid
from flwr_hetero.mod import preload
from flwr_hetero_studies.tasks.data import Examples, hold_out, load_partition
from flwr_hetero_studies.tasks.models import model_from
from flwr_hetero_studies.tasks.settings import Settings
from flwr_hetero_studies.tasks.training import OnBatch, TrainResult, evaluate, train

PROXIMAL_MU = "proximal-mu"
"""Flower's key in the instructions of its FedProx."""
NUM_PARTITIONS = "num-partitions"
"""Flower's key in node_config."""


@dataclass(frozen=True)
class NodeTask:
    """A node's data and settings for one message."""

    message: Message
    settings: Settings
    examples: Examples
    held_out: Examples
    seed: int
    is_real: bool = False

    @property
    def config(self) -> ConfigRecord:
        return self.message.content.config_records.get("config", ConfigRecord())

    @property
    def losses(self) -> Loss:
        return self.examples.task.losses

    def num_steps(self, sampler: BatchSampler) -> int:
        """Return the steps that the server asks for, or those of ``local-epochs``."""
        asked = in_config(self.message, keys.NUM_STEPS)
        return asked or self.settings.local_epochs * len(sampler)

    def model(self) -> nn.Module:
        state = self.message.content.array_records["arrays"].to_torch_state_dict()
        return model_from(state, self.settings.model, *self.settings.shape)

    def sampler(self) -> UniformSampler:
        return UniformSampler(len(self.examples), self.settings.batch_size, seed=self.seed)

    def train(
        self, model: nn.Module, sampler: BatchSampler, on_batch: OnBatch | None = None
    ) -> TrainResult:
        names = ("optimizer", "momentum", "weight_decay", "device")
        given: dict[str, Any] = {name: getattr(self.settings, name) for name in names}
        given["lr"] = self.settings.lr_in(in_config(self.message, keys.SERVER_ROUND))
        mu: Any = self.config.get(PROXIMAL_MU, 0.0)
        given |= {"num_steps": self.num_steps(sampler), "proximal": float(mu)}
        return train(model, self.examples, sampler, on_batch=on_batch, **given)

    def work(self, num_steps: int, examples_processed: int) -> MetricRecord:
        work = {keys.NUM_EXAMPLES: len(self.examples), keys.NUM_STEPS: num_steps}
        return MetricRecord({**work, keys.EXAMPLES_PROCESSED: examples_processed})

    def reply(self, model: nn.Module, result: TrainResult) -> Message:
        metrics = self.work(result.num_steps, result.examples_processed)
        metrics[keys.EXAMPLES_SCORED] = result.examples_scored
        metrics["train-loss"] = result.loss
        metrics[keys.LOSS_RMS] = result.loss_rms
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        if self.is_real:
            # An emulated device's pace is known from its profile.
            content[keys.WORK] = ConfigRecord(
                {keys.NUM_STEPS: result.num_steps, keys.STEP_TIME: result.step_s}
            )
        return Message(content, reply_to=self.message)


def open_node(message: Message, context: Context) -> NodeTask:
    # In a simulation several nodes share the machine.
    if in_simulation() and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
    settings, part = open_data(context)
    seed = seed_of(message, settings.seed, int(context.node_config[keys.PARTITION_ID]))
    return NodeTask(message, settings, *hold_out(part), seed, not is_emulated(context))


@preload
def open_data(context: Context) -> tuple[Settings, Examples]:
    """Read the settings and the node's examples; a warm node does so once per run."""
    settings = Settings.shared_part(context.run_config)
    for key in (keys.PARTITION_ID, NUM_PARTITIONS):
        if key not in context.node_config:
            hint = 'start the SuperNode with --node-config "partition-id=0 num-partitions=5"'
            raise invalid("node_config", dict(context.node_config), f"hold {key!r}", hint)
    part = int(context.node_config[keys.PARTITION_ID]), int(context.node_config[NUM_PARTITIONS])
    return settings, load_partition(settings.dataset, *part, **settings.partitioning)


def seed_of(message: Message, seed: int, partition_id: int) -> int:
    """Return a seed that differs between rounds, and between messages of a round."""
    repeat = in_config(message, keys.REPEAT)
    entropy = [seed, partition_id, in_config(message, keys.SERVER_ROUND)]
    entropy += [repeat] if repeat else []
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def train_node(message: Message, context: Context) -> Message:
    """Train on the node's reshuffled examples: a ``train`` function."""
    node = open_node(message, context)
    model = node.model()
    return node.reply(model, node.train(model, node.sampler()))


def profile_node(message: Message, context: Context) -> Message:
    """Do the work of a round, or count it on an emulated device: ``train.profile``."""
    node = open_node(message, context)
    sampler = node.sampler()
    # An emulated device takes the time by itself, but a real one has to train.
    if is_emulated(context):
        num_steps = node.num_steps(sampler)
        processed = examples_in(num_steps, sampler.num_samples, sampler.batch_size)
    else:
        num_steps, processed, *_ = node.train(node.model(), sampler)
    arrays = message.content.array_records["arrays"]
    content = RecordDict({"arrays": arrays, "metrics": node.work(num_steps, processed)})
    return Message(content, reply_to=message)


def evaluate_node(message: Message, context: Context) -> Message:
    """Measure the model on the node's held-out examples: an ``evaluate`` function."""
    node = open_node(message, context)
    loss, accuracy = evaluate(node.model(), node.held_out, device=node.settings.device)
    metrics = MetricRecord({"eval-loss": loss, "eval-acc": accuracy})
    metrics[keys.NUM_EXAMPLES] = len(node.held_out)
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def examples_in(num_steps: int, num_examples: int, batch_size: int) -> int:
    """Count the examples in steps of reshuffled epochs, whose last batch may be smaller."""
    epochs, steps = divmod(num_steps, -(-num_examples // batch_size))
    return epochs * num_examples + min(steps * batch_size, num_examples)

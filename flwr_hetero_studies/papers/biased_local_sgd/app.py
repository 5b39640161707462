"""The app of the study: biased local SGD, each bias alone, and FedNova, on a run-config."""

from dataclasses import dataclass, replace
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flwr_hetero import keys
from flwr_hetero.biased_local_sgd.shared_data import read_samples, samples_record
from flwr_hetero.errors import invalid
from flwr_hetero.mod import emulated_device, follow
from flwr_hetero.sampler import TopLossSampler
from flwr_hetero.strategy import BiasedLocalSGD, FedNova, Wrapper
from flwr_hetero_studies.tasks import Examples, Settings, load_partition
from flwr_hetero_studies.tasks.node import evaluate_node, open_node, profile_node

BIASES = {
    "biased": (True, True),
    "weights-bias": (True, False),
    "sampling-bias": (False, True),
    "unbalanced": (False, False),
    "balanced": (False, False),
    "sync-sgd": (False, False),
}
"""Algorithm to whether models are weighted by steps, and whether fast nodes sample by loss."""
FEDNOVA = "fednova"
STATE = "top-loss"


@dataclass(frozen=True)
class BiasedSettings(Settings):
    """The run-config of the app."""

    algorithm: str = "biased"
    fast_steps: int = 32
    budget: str = "two-class"
    high_loss_fraction: float = 0.5
    share: float = 0.0
    shared_data: bool = False
    partition: str = "iid"
    fleet: str = "gpu-cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("algorithm", (*BIASES, FEDNOVA))
        if self.shared_data and self.algorithm == FEDNOVA:
            rule = "be false with fednova, whose nodes have data of their own"
            raise invalid("shared-data", True, rule, "choose another algorithm")
        # refuses settings that the strategy cannot take
        self._strategy(1 if self.shared_data else None)

    def strategy(self) -> Wrapper:
        """Make the strategy of the algorithm."""
        return self._strategy(len(all_examples(self)) if self.shared_data else None)

    def _strategy(self, shared_samples: int | None) -> Wrapper:
        inner = FedAvg(fraction_evaluate=0.0)
        if self.algorithm == FEDNOVA:
            return FedNova(inner, self.fast_steps, budget=self.budget)
        weights, sampling = BIASES[self.algorithm]
        steps = 1 if self.algorithm == "sync-sgd" else self.fast_steps
        has_equal_steps = self.algorithm in ("balanced", "sync-sgd")
        budget: dict[str, Any] = {"gamma": 1.0} if has_equal_steps else {"budget": self.budget}
        return BiasedLocalSGD(
            inner,
            steps,
            weigh_by_steps=weights,
            step_correction=0.0,
            high_loss_fraction=self.high_loss_fraction if sampling else None,
            share=self.share or None,
            shared_samples=shared_samples,
            batch_size=self.batch_size,
            seed=self.seed,
            **budget,
        )


def all_examples(settings: Settings) -> Examples:
    """Load the data set that all nodes see in shared-data mode."""
    return load_partition(settings.dataset, 0, 1, task=settings.task, seed=settings.seed)


app = ClientApp(mods=[emulated_device])
app.train("profile")(profile_node)
app.evaluate()(evaluate_node)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take the assigned steps, record the losses, and keep them until the next round."""
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

"""Biased local SGD's runs: fast and slow nodes that share one data set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.biased_local_sgd.algorithm import fast_class, gamma_steps
from flwr_hetero.biased_local_sgd.shared_data import SharedSamples, read_samples, samples_record
from flwr_hetero.client.emulation import in_config
from flwr_hetero.fleet import DeviceProfile
from flwr_hetero.fleet.local_grid import FIRST_NODE_ID
from flwr_hetero.sampler import TopLossSampler
from flwr_hetero.strategy import BiasedLocalSGD
from flwr_hetero_studies.core.criteria import PAIRS
from flwr_hetero_studies.core.curves import Columns
from flwr_hetero_studies.core.emulate import emulate
from flwr_hetero_studies.core.experiment import Curve
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.core.tables import spread
from flwr_hetero_studies.tasks import Examples, Settings, load_partition, open_node

TAU_F = 32
"""Steps of a fast node in a round."""
GAPS = (16, 4, 1)
"""Steps of a slow node in the time in which a fast one takes ``TAU_F``."""
DECAYS = (0.6, 0.8)
"""Parts of a run after which the learning rate falls to a tenth."""
RESNET20 = "flwr_hetero_studies.papers.biased_local_sgd.model:resnet20"
PAPER: dict[int, dict[str, Any]] = {
    2: {"batch-size": 128, "learning-rate": 0.3, "weight-decay": 1e-4, "model": RESNET20},
    10: {"batch-size": 32, "learning-rate": 0.1, "weight-decay": 1e-4, "model": RESNET20},
}
"""Settings for CIFAR-10, by the number of nodes (Tables 4 and 5)."""
SHORT: dict[int, dict[str, Any]] = {
    2: {"batch-size": 16, "learning-rate": 0.09, "weight-decay": 1e-4, "model": "mlp"},
    10: {"batch-size": 4, "learning-rate": 0.03, "weight-decay": 1e-4, "model": "mlp"},
}
"""Settings of the short form: within a factor of 3 as many batches in an epoch as in the paper."""
EPOCHS = 100
SHORT_EPOCHS = 3
"""Examples processed in a run, as a multiple of the data."""


@dataclass(frozen=True)
class Case:
    """An algorithm on fast and slow nodes, ``slow_steps`` of which last as long as ``TAU_F``.

    It runs for ``times`` the paper's epochs, or as many rounds as another case.
    """

    fast: int = 8
    slow: int = 2
    slow_steps: int = 1
    steps: int = TAU_F
    balanced: bool = False
    sampling: bool = True
    weights: bool = True
    unified: bool = False
    high_loss_to_slow: bool = False
    times: float = 1.0
    as_long_as: "Case | None" = None

    @property
    def batches(self) -> int:
        slow_steps = self.steps if self.balanced else self.slow_steps
        return self.steps * self.fast + self.slow * slow_steps

    def rounds(self, batches_per_epoch: float, epochs: float) -> int:
        if self.as_long_as:
            return self.as_long_as.rounds(batches_per_epoch, epochs)
        return ceil(self.times * epochs * batches_per_epoch / self.batches)

    @property
    def gammas(self) -> dict[str, float]:
        """The performance gap ratio of each node; the second name is that from its reply on."""
        ratios = [1.0] * self.fast + [self.slow_steps / TAU_F] * self.slow
        first = {f"id-{FIRST_NODE_ID + number}": ratio for number, ratio in enumerate(ratios)}
        return first | {f"node-{number}": ratio for number, ratio in enumerate(ratios)}

    @property
    def fleet(self) -> list[DeviceProfile]:
        slow = DeviceProfile(self.slow_steps / TAU_F, name="slow")
        return [DeviceProfile(name="fast")] * self.fast + [slow] * self.slow


class MeanRun(NamedTuple):
    """Rounds, and of each seed the seconds, the final accuracy, and accuracy by time."""

    rounds: int
    rounds_per_epoch: float
    times: Sequence[float]
    finals: Sequence[float]
    by_time: Sequence[Curve]

    def at(self, seconds: Sequence[float]) -> list[float]:
        """Return the accuracy of each seed when another run of it had so many seconds."""
        return [curve.at(s) for curve, s in zip(self.by_time, seconds, strict=True)]

    @property
    def percent(self) -> str:
        return spread(self.finals, ".2f", ".2f")


def train(options: Options, case: Case) -> MeanRun:
    runs = [_train(options, case, seed) for seed in options.seeds_or(range(PAIRS))]
    curves = [Curve(run["virtual_s"], [100 * each for each in run["accuracy"]]) for run in runs]
    rounds = int(runs[0]["round"][-1])
    num_examples = len(shared_examples(options.dataset("images"), 0))
    epochs = rounds * case.batches * setting(options, case)["batch-size"] / num_examples
    ends = [curve.x[-1] for curve in curves]
    finals = [curve.y[-1] for curve in curves]
    return MeanRun(rounds, rounds / epochs, ends, finals, curves)


def setting(options: Options, case: Case) -> dict[str, Any]:
    """Return batch size, learning rate, weight decay and model; eight fast nodes train as ten."""
    return dict(options.pick(SHORT, PAPER)[2 if case.fast == 1 else 10])


def _train(options: Options, case: Case, seed: int) -> Columns:
    shared = setting(options, case)
    dataset = options.dataset("images")
    batch = int(shared["batch-size"])
    num_examples = len(shared_examples(dataset, seed))
    rounds = case.rounds(num_examples / batch, options.pick(SHORT_EPOCHS, EPOCHS))
    config = {"dataset": dataset, "partition": "iid", "seed": seed, "num-server-rounds": rounds}
    config |= shared
    strategy = (BiasedLocalSGD if case.balanced else KnownSpeeds)(
        FedAvg(fraction_evaluate=0.0),
        case.steps,
        gamma=1.0 if case.balanced else None,
        weigh_by_steps=case.weights,
        step_correction=0.0,
        high_loss_fraction=0.5 if case.sampling else None,
        shared_samples=num_examples,
        batch_size=batch,
        unified=case.unified,
        seed=seed,
    )
    if isinstance(strategy, KnownSpeeds):
        strategy.gammas = case.gammas
    if case.high_loss_to_slow:
        strategy.shared = HighLossToSlow(num_examples, batch, 0.5, None, case.unified, seed)
    settings = Settings.from_run_config(config)
    every = max(1, rounds // 40)
    return emulate(shared_app(), settings, strategy, case.fleet, config, every=every)


class KnownSpeeds(BiasedLocalSGD):
    """Biased local SGD with the gamma of each node given, as in the paper."""

    gammas: Mapping[str, float] = MappingProxyType({})

    def num_steps(self, nodes: Sequence[str]) -> NDArray[np.int64]:
        gammas = [self.gammas[node] for node in nodes]
        return gamma_steps(gammas, self.fast_steps)

    def fast_nodes(self) -> set[str]:
        fast, _ = fast_class([1 / gamma for gamma in self.gammas.values()])
        return {node for node, is_fast in zip(self.gammas, fast, strict=True) if is_fast}


class HighLossToSlow(SharedSamples):
    """Give the samples of high loss to the slow nodes (Table 6)."""

    def draw(self, num_steps: Sequence[int], fast: Sequence[bool]) -> list[Any]:
        return super().draw(num_steps, [not each for each in fast])


def shared_examples(dataset: str, seed: int) -> Examples:
    return load_partition(dataset, 0, 1, seed=seed)


def shared_app() -> ClientApp:
    """Make nodes that train on the samples that the server assigns, and report their losses."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        node = open_node(message, context)
        given = node.settings
        done = in_config(message, keys.SERVER_ROUND) / given.num_server_rounds
        rate = given.learning_rate * 0.1 ** sum(done > part for part in DECAYS)
        examples = shared_examples(given.dataset, given.seed)
        node = replace(node, examples=examples, settings=replace(given, learning_rate=rate))
        sampler = TopLossSampler(len(examples), given.batch_size, seed=node.seed, fast=False)
        samples = message.content.config_records.get(keys.SAMPLES)
        if samples is not None:
            sampler.assign(read_samples(samples)[0])
        model = node.model()
        reply = node.reply(model, node.train(model, sampler))
        if samples is not None:
            reply.content[keys.SAMPLES] = samples_record(*sampler.take_losses())
        return reply

    return app


def compare(options: Options, cases: Mapping[str, Case]) -> dict[str, MeanRun]:
    runs = {}
    for name, case in cases.items():
        options.say(name)
        runs[name] = train(options, case)
    return runs

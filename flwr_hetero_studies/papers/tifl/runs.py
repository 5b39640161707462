"""TiFL's runs: CPU shares, partitions and policies of section 5, and what is kept of a run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flwr_hetero.fleet import DeviceProfile
from flwr_hetero.strategy import TiFL
from flwr_hetero.tifl.algorithm import ALGORITHM_2, VANILLA
from flwr_hetero_studies.core.criteria import PAIRS, Claim
from flwr_hetero_studies.core.curves import Columns, Vector
from flwr_hetero_studies.core.emulate import Moment, emulate
from flwr_hetero_studies.core.experiment import Curve, Finding
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.tasks import Settings, evaluate_node, profile_node, train_node

CIFAR_CPUS = (4.0, 2.0, 1.0, 0.5, 0.1)
EQUAL_CPUS = (2.0,)
SPREAD = 0.05
"""Standard deviation of the logarithm of a device's speed: equal devices could not be sorted into
tiers."""
JITTER = 0.03
"""Standard deviation of the logarithm of a device's time, from round to round."""
ADAPTIVE = "adaptive"
"""The paper's Algorithm 2 without a limit of credits."""
CAPPED = "adaptive, credits"
"""Algorithm 2 with half as many credits from tier to tier."""
MODELS = "flwr_hetero_studies.papers.tifl.models"
PAPER: dict[str, Any] = {
    "optimizer": "rmsprop",
    "learning-rate": 0.001,
    "lr-decay": 0.995,
    "batch-size": 10,
}
"""With the paper's 0.01, RMSprop without state in each round leaves the models at chance."""


@dataclass(frozen=True)
class Plan:
    """The settings that all policies of a figure share; ``fast_`` is for the short form."""

    cpus: Sequence[float] = EQUAL_CPUS
    partition: Mapping[str, Any] = field(default_factory=lambda: {"partition": "iid"})
    model: str = "cifar_cnn"
    nodes: int = 50
    per_round: int = 5
    rounds: int = 500
    fast_rounds: int = 30
    fast_model: str = "cnn"
    config: Mapping[str, Any] = field(default_factory=lambda: PAPER)

    @property
    def fleet(self) -> list[DeviceProfile]:
        shares = [self.cpus[node * len(self.cpus) // self.nodes] for node in range(self.nodes)]
        spread = np.exp(SPREAD * np.random.default_rng(0).standard_normal(self.nodes))
        return [DeviceProfile(float(speed), jitter=JITTER) for speed in shares * spread]


class Trained(NamedTuple):
    """Of each seed: seconds of training and in all, final accuracy, and accuracy by time."""

    seconds: Vector
    all_s: Vector
    accuracy: Vector
    by_time: Sequence[Curve]

    def at(self, seconds: Vector) -> Vector:
        """Return the accuracy of each seed when another run of it had so many seconds."""
        return np.array([c.at(s) for c, s in zip(self.by_time, seconds, strict=True)])


def train(options: Options, plan: Plan, policy: str) -> Trained:
    runs = [_train(options, plan, policy, seed) for seed in options.seeds_or(range(PAIRS))]
    seconds = np.array([run["training_s"][-1] for run in runs])
    all_s = np.array([run["virtual_s"][-1] for run in runs])
    curves = []
    for run in runs:
        curves.append(Curve(run["training_s"], [100 * value for value in run["accuracy"]]))
    # the mean of the last tenth of the rounds
    finals = np.array([np.mean(curve.y[-max(1, len(curve.y) // 10) :]) for curve in curves])
    return Trained(seconds, all_s, finals, curves)


def _train(options: Options, plan: Plan, policy: str, seed: int) -> Columns:
    """Train once; return seconds of training, seconds in all and accuracy, round by round."""
    rounds = options.pick(plan.fast_rounds, plan.rounds)
    config = {"dataset": options.dataset("images"), "num-server-rounds": rounds, "seed": seed}
    config |= {**plan.config, **plan.partition}
    config["model"] = options.pick(plan.fast_model, f"{MODELS}:{plan.model}")
    strategy = TiFL(
        FedAvg(fraction_evaluate=0.0),
        plan.per_round,
        policy=ALGORITHM_2 if policy in (ADAPTIVE, CAPPED) else policy,
        credits=[-(-rounds // 2**tier) for tier in range(5)] if policy == CAPPED else None,
        interval=options.pick(5, 10),
        profiling="phase",
        warmup_rounds=0,
        seed=seed,
    )

    def note(moment: Moment) -> dict[str, float]:
        return {"training_s": moment.record["tifl"]["actual_s"]}

    settings = Settings.from_run_config(config)
    return emulate(APP, settings, strategy, plan.fleet, config, note=note)


APP = ClientApp()
"""Nodes that train as those of the apps."""
APP.train()(train_node)
APP.train("profile")(profile_node)
APP.evaluate()(evaluate_node)


def compare(
    options: Options, plans: Mapping[str, Plan], policies: Iterable[str]
) -> dict[str, dict[str, Trained]]:
    """Train every policy in every setting."""
    runs: dict[str, dict[str, Trained]] = {}
    for setting, plan in plans.items():
        runs[setting] = {}
        for policy in policies:
            options.say(f"{setting}: {policy}")
            runs[setting][policy] = train(options, plan, policy)
    return runs


def outcome(
    runs: Mapping[str, Mapping[str, Trained]],
    claims: Sequence[Claim],
    paper: Mapping[str, str] | None = None,
) -> Finding:
    """Make a table of settings and policies; ``paper`` has what it prints of "setting, policy"."""
    rows = []
    for setting, policies in runs.items():
        for policy, trained in policies.items():
            training_s, all_s, percent = (float(np.mean(column)) for column in trained[:3])
            faster = 1.0
            if VANILLA in policies:
                faster = float(np.mean(policies[VANILLA].seconds)) / training_s
            cells = (f"{training_s:.1f}", f"{faster:.2f}x", f"{all_s:.1f}", f"{percent:.2f}")
            rows.append((setting, policy, *cells, (paper or {}).get(f"{setting}, {policy}", "")))
    head = ("setting", "policy", "training s", "faster", "in all s", "accuracy %", "paper")
    return Finding(head, rows, claims)

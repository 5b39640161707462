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
from flwr_hetero_studies.core.emulate import Moment, emulate
from flwr_hetero_studies.core.experiment import Claim, Curve, Finding
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.tasks import Settings, evaluate_node, profile_node, train_node

CIFAR_CPUS, MNIST_CPUS = (4.0, 2.0, 1.0, 0.5, 0.1), (2.0, 1.0, 0.75, 0.5, 0.25)
EQUAL_CPUS = (2.0,)
SPREAD, JITTER = 0.05, 0.03
"""Standard deviations of the logarithm of a device's speed, and of its time from round to round:
real devices have both, and without the first equal ones could not be sorted into tiers."""
ADAPTIVE, CAPPED = "adaptive", "adaptive, credits"
"""The paper's Algorithm 2: without a limit of credits, and with half as many from tier to tier."""
UNIFORM, SLOW, FAST = "uniform", "slow", "fast"
STATIC = (VANILLA, SLOW, UNIFORM, "random", FAST)
COMBINED = {"partition": "quantity-classes", "classes-per-node": 5}
QUANTITY = {"partition": "quantity"}
LEVELS = (2, 5, 10)
"""Classes per client."""
ALIKE = 3.71
"""Points of accuracy that the paper calls a very small difference (section 5.2.2)."""
SHORT_MODEL, MODELS = "cnn", "flwr_hetero_studies.papers.tifl.models"
PAPER: dict[str, Any] = {"optimizer": "rmsprop", "learning-rate": 0.001, "lr-decay": 0.995,
                         "batch-size": 10}  # fmt: skip
"""With the paper's 0.01, RMSprop without state in each round leaves the models at chance."""
OPTIMIZER = (
    "torch's RMSprop starts without state in each round and has a learning rate of 0.001, for with "
    "the paper's 0.01 the models stay at chance; --data gives the data set"
)
FLEET = (
    "CPU shares are emulated: time in proportion to examples and 1 / share, 5 % spread, 3 % "
    "jitter; as in the paper, profiling and evaluation do not count, but in the column 'in all'"
)
BOTH = f"{FLEET}; {OPTIMIZER}"
CREDITS = (
    "the paper does not print ChangeProbs, credits and the interval: ranks, no limit or half as "
    "many credits from tier to tier, and every 10 rounds"
)
CUT = "the digits of scikit-learn, a small CNN, {} rounds, {}; tiers are measured every 5"
SMALL = CUT.format(30, "2 seeds")


@dataclass(frozen=True)
class Plan:
    """What the policies of a figure have in common; ``fast_`` is for the short form."""

    cpus: Sequence[float] = EQUAL_CPUS
    partition: Mapping[str, Any] = field(default_factory=lambda: {"partition": "iid"})
    model: str = "cifar_cnn"
    nodes: int = 50
    per_round: int = 5
    rounds: int = 500
    fast_rounds: int = 30
    fast_seeds: int = 2
    config: Mapping[str, Any] = field(default_factory=lambda: PAPER)

    @property
    def fleet(self) -> list[DeviceProfile]:
        shares = [self.cpus[node * len(self.cpus) // self.nodes] for node in range(self.nodes)]
        spread = np.exp(SPREAD * np.random.default_rng(0).standard_normal(self.nodes))
        return [DeviceProfile(float(speed), jitter=JITTER) for speed in shares * spread]


def classes(count: int) -> dict[str, str | int]:
    return {"partition": "classes", "classes-per-node": count}


class Trained(NamedTuple):
    """Means over seeds: seconds of training and in all, final accuracy, and accuracy by time."""

    seconds: float
    all_s: float
    accuracy: float
    by_time: Curve


def train(options: Options, plan: Plan, policy: str) -> Trained:
    seeds = range(options.seed, options.seed + options.pick(plan.fast_seeds, 5))
    runs = [_train(options, plan, policy, seed) for seed in seeds]
    seconds, all_s, percent = (np.mean(rows, axis=0).tolist() for rows in zip(*runs, strict=True))
    final = float(np.mean(percent[-max(1, len(percent) // 10) :]))
    return Trained(seconds[-1], all_s[-1], final, Curve(seconds, percent))


def _train(options: Options, plan: Plan, policy: str, seed: int) -> tuple[list[float], ...]:
    """Return seconds of training, seconds in all and percent, from round to round."""
    rounds = options.pick(plan.fast_rounds, plan.rounds)
    config = {"dataset": options.dataset("images"), "num-server-rounds": rounds, "seed": seed}
    config |= {**plan.config, **plan.partition}
    config["model"] = options.pick(SHORT_MODEL, f"{MODELS}:{plan.model}")
    how: dict[str, Any] = {"profiling": "phase", "warmup_rounds": 0, "seed": seed}
    how |= {"policy": ALGORITHM_2 if policy in (ADAPTIVE, CAPPED) else policy}
    if policy == CAPPED:
        how["credits"] = [-(-rounds // 2**tier) for tier in range(5)]
    strategy = TiFL(FedAvg(fraction_evaluate=0.0), plan.per_round,
                    interval=options.pick(5, 10), **how)  # fmt: skip

    def note(moment: Moment) -> dict[str, float]:
        return {"training_s": moment.record["tifl"]["actual_s"]}

    settings = Settings.from_run_config(config)
    found = emulate(APP, settings, strategy, plan.fleet, config, note=note)
    percent = [100 * accuracy for accuracy in found["accuracy"]]
    return found["training_s"], found["virtual_s"], percent


APP = ClientApp()
"""Nodes that train as those of the apps."""
APP.train()(train_node)
APP.train("profile")(profile_node)
APP.evaluate()(evaluate_node)


def compare(
    options: Options, plans: Mapping[str, Plan], policies: Iterable[str]
) -> dict[str, dict[str, Trained]]:
    found: dict[str, dict[str, Trained]] = {}
    for setting, plan in plans.items():
        found[setting] = {}
        for policy in policies:
            options.say(f"{setting}: {policy}")
            found[setting][policy] = train(options, plan, policy)
    return found


def outcome(
    found: Mapping[str, Mapping[str, Trained]],
    claims: Sequence[Claim],
    paper: Mapping[str, str] | None = None,
) -> Finding:
    """Make a table of settings and policies; ``paper`` says of "setting, policy" what it prints."""
    rows = []
    for setting, policies in found.items():
        for policy, one in policies.items():
            faster = policies[VANILLA].seconds / one.seconds if VANILLA in policies else 1.0
            cells = f"{one.seconds:.1f}", f"{faster:.2f}x", f"{one.all_s:.1f}"
            percent = f"{one.accuracy:.2f}"
            printed = (paper or {}).get(f"{setting}, {policy}", "")
            rows.append((setting, policy, *cells, percent, printed))
    head = ("setting", "policy", "training s", "faster", "in all s", "accuracy %", "paper")
    return Finding(head, rows, claims)


def speed(found: Mapping[str, Trained], policy: str, over: str = VANILLA) -> float:
    return found[over].seconds / found[policy].seconds


def percents(found: Mapping[str, Trained], policies: Iterable[str] = ()) -> dict[str, float]:
    return {name: found[name].accuracy for name in (tuple(policies) or found)}


def lowest(text: str, published: str, found: Mapping[str, Trained], policy: str) -> Claim:
    own, others = found[policy].accuracy, min(v for n, v in percents(found).items() if n != policy)
    here = f"{own:.2f}; others from {others:.2f}"
    return Claim(f"{text} (the lowest accuracy)", published, here, own < others)


def alike(text: str, published: str, values: Mapping[str, float]) -> Claim:
    spread = max(values.values()) - min(values.values())
    here = ", ".join(f"{name} {value:.1f}" for name, value in values.items())
    return Claim(f"{text} (within {ALIKE} points)", published, here, spread <= ALIKE)

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
from flwr_hetero_studies.core.criteria import PAIRS, Claim, Values
from flwr_hetero_studies.core.emulate import Moment, emulate
from flwr_hetero_studies.core.experiment import Curve, Finding
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.tasks import Settings, evaluate_node, profile_node, train_node

CIFAR_CPUS = (4.0, 2.0, 1.0, 0.5, 0.1)
EQUAL_CPUS = (2.0,)
SPREAD = 0.05
JITTER = 0.03
"""Standard deviations of the logarithm of a device's speed, and of its time from round to round:
real devices have both, and without the first equal ones could not be sorted into tiers."""
ADAPTIVE = "adaptive"
CAPPED = "adaptive, credits"
"""The paper's Algorithm 2: without a limit of credits, and with half as many from tier to tier."""
SHORT_MODEL = "cnn"
MODELS = "flwr_hetero_studies.papers.tifl.models"
PAPER: dict[str, Any] = {"optimizer": "rmsprop", "learning-rate": 0.001, "lr-decay": 0.995,
                         "batch-size": 10}  # fmt: skip
"""With the paper's 0.01, RMSprop without state in each round leaves the models at chance."""
OPTIMIZER = ("torch's RMSprop starts without state in each round, at 0.001, for "
             "with the paper's 0.01 the models stay at chance")  # fmt: skip
FLEET = ("CPU shares are emulated: time in proportion to examples and 1 / share, 5 % spread, "
         "3 % jitter; profiling and evaluation count in the column 'in all' only")  # fmt: skip
BOTH = f"{FLEET}; {OPTIMIZER}"
CREDITS = ("the paper does not print ChangeProbs, credits and the interval: ranks, "
           "no limit or half as many credits from tier to tier, and every 10 rounds")  # fmt: skip
CUT = "the digits of scikit-learn, a small CNN, {} rounds; tiers are measured every 5"
SMALL = CUT.format(30)


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
    fast_model: str = SHORT_MODEL
    config: Mapping[str, Any] = field(default_factory=lambda: PAPER)

    @property
    def fleet(self) -> list[DeviceProfile]:
        shares = [self.cpus[node * len(self.cpus) // self.nodes] for node in range(self.nodes)]
        spread = np.exp(SPREAD * np.random.default_rng(0).standard_normal(self.nodes))
        return [DeviceProfile(float(speed), jitter=JITTER) for speed in shares * spread]


class Trained(NamedTuple):
    """Of each seed: seconds of training and in all, final accuracy, and accuracy by time."""

    seconds: Values
    all_s: Values
    accuracy: Values
    by_time: Sequence[Curve]

    def at(self, seconds: Values) -> Values:
        """Return the accuracy of each seed when another run of it had so many seconds."""
        return np.array([c.at(s) for c, s in zip(self.by_time, seconds, strict=True)])


def train(options: Options, plan: Plan, policy: str) -> Trained:
    runs = [_train(options, plan, policy, seed) for seed in options.seeds_or(range(PAIRS))]
    ends = np.array([(training[-1], whole[-1]) for training, whole, _ in runs]).T
    finals = np.array([np.mean(each[-max(1, len(each) // 10) :]) for *_, each in runs])
    return Trained(*ends, finals, [Curve(training, each) for training, _, each in runs])


def _train(options: Options, plan: Plan, policy: str, seed: int) -> tuple[list[float], ...]:
    """Return seconds of training, seconds in all and percent, from round to round."""
    rounds = options.pick(plan.fast_rounds, plan.rounds)
    config = {"dataset": options.dataset("images"), "num-server-rounds": rounds, "seed": seed}
    config |= {**plan.config, **plan.partition}
    config["model"] = options.pick(plan.fast_model, f"{MODELS}:{plan.model}")
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
        for policy, each in policies.items():
            one = _means(each)
            faster = _means(policies[VANILLA])[0] / one[0] if VANILLA in policies else 1.0
            cells = f"{one[0]:.1f}", f"{faster:.2f}x", f"{one[1]:.1f}", f"{one[2]:.2f}"
            rows.append((setting, policy, *cells, (paper or {}).get(f"{setting}, {policy}", "")))
    head = ("setting", "policy", "training s", "faster", "in all s", "accuracy %", "paper")
    return Finding(head, rows, claims)


def _means(one: Trained) -> list[float]:
    return [float(np.mean(each)) for each in one[:3]]

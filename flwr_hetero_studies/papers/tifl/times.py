"""The experiments of TiFL that need no trained model: its times, and Tables 1 and 2."""

import time
from math import comb
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flwr_hetero import keys
from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero.fleet import LocalGrid
from flwr_hetero.server.loop import Run
from flwr_hetero.strategy import TiFL, Wrapper
from flwr_hetero.tifl.algorithm import VANILLA, policy_probs
from flwr_hetero.tifl.tiers import paper_estimate
from flwr_hetero_studies.core.criteria import PAIRS, fact, made, within
from flwr_hetero_studies.core.curves import Vector
from flwr_hetero_studies.core.experiment import Finding
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.tifl.runs import CIFAR_CPUS, MODELS, PAPER, Plan
from flwr_hetero_studies.tasks import data_shape, load_partition, make_model
from flwr_hetero_studies.tasks import train as train_steps

TABLE_1 = {"slow": (0.0, 0.0, 0.0, 0.0, 1.0), "uniform": (0.2,) * 5,
           "random": (0.7, 0.1, 0.1, 0.05, 0.05), "fast": (1.0, 0.0, 0.0, 0.0, 0.0),
           "fast1": (*[0.225] * 4, 0.1), "fast2": (*[0.2375] * 4, 0.05),
           "fast3": (*[0.25] * 4, 0.0)}  # fmt: skip
"""Probabilities of the tiers as printed, so that a slip in the package is seen."""
TABLE_2 = {"slow": (46242, 44977, 2.76), "uniform": (12693, 12643, 0.4),
           "random": (5143, 5053, 1.8), "fast": (1837, 1750, 5.01)}  # fmt: skip
"""Seconds estimated, seconds taken, and MAPE in percent."""
DELAYED_S = 5.0
"""Between a round with a node of 0.1 CPU, which takes 10 s, and one without, 2 s at most."""
STUDY_CPUS = (4.0, 2.0, 1.0, 1 / 3, 1 / 5)
"""CPU shares of the paper's case study (section 3.3)."""


def figure_1a(options: Options) -> Finding:
    amounts = options.pick((100, 200, 500, 1000), (500, 1000, 2000, 5000))
    dataset = options.dataset("images")
    examples = load_partition(dataset, 0, 1)
    shape = data_shape(dataset)
    model = make_model(options.pick("cnn", f"{MODELS}:cifar_cnn"), *shape)
    taken = []
    for amount in (amounts[0], *amounts):  # the first is for the warm-up
        part = type(examples)(examples.inputs[:amount], examples.targets[:amount])
        sampler = UniformSampler(amount, int(PAPER["batch-size"]))
        start_s = time.process_time()
        train_steps(model, part, sampler, num_steps=len(sampler), lr=0.001)
        taken.append(time.process_time() - start_s)
    ratio = taken[-1] / taken[1]
    more = amounts[-1] / amounts[0]
    text = f"{more:g} times the data take near-linearly more time (factor of 0.8 to 1.25 of linear)"
    # as many batches as data, one after another
    claim = made(text, f"{more:g}x", f"{ratio:.1f}x", 0.8 <= ratio / more <= 1.25)
    # CPU shares are emulated, as in the fleet
    rows = [
        (amount, *(f"{one_s / cpu:.3f}" for cpu in STUDY_CPUS))
        for amount, one_s in zip(amounts, taken[1:], strict=True)
    ]
    return Finding(("examples", *(f"{cpu:.2g} CPU, s" for cpu in STUDY_CPUS)), rows, [claim])


def table_1(options: Options) -> Finding:
    ours = {policy: tuple(policy_probs(policy, 5).tolist()) for policy in TABLE_1}
    rows = [(p, *(f"{v:g}" for v in ours[p]), ", ".join(map(str, x))) for p, x in TABLE_1.items()]
    equal = sum(ours[policy] == printed for policy, printed in TABLE_1.items())
    text = "every policy has the probabilities of the table"
    claim = made(text, "7 policies", f"{equal} equal", equal == len(TABLE_1))
    return Finding(("policy", *(f"tier {j}" for j in range(1, 6)), "paper"), rows, [claim])


def table_2(options: Options) -> Finding:
    rounds = 500
    seeds = options.seeds_or(range(PAIRS))
    rows = []
    claims = []
    for policy, (paper_est, paper_act, paper_mape) in TABLE_2.items():
        options.say(policy)
        estimates_s, actual_s = np.array([tier_times(policy, rounds, seed) for seed in seeds]).T
        errors = mape(estimates_s, actual_s)
        cells = (f"{estimates_s.mean():.0f}", f"{actual_s.mean():.0f}", f"{errors.mean():.2f}")
        paper = f"{paper_est}, {paper_act}, {paper_mape}"
        rows.append((policy, *cells, paper))
        claims.append(within(f"{policy}: the error of Eq. 6 is at most 6 %", f"{paper_mape} %",
                             errors, high=6, form=".2f", unit=" %"))  # fmt: skip
    head = ("policy", "Eq. 6, s", "actual, s", "MAPE, %", "paper: Eq. 6, actual, MAPE")
    return Finding(head, rows, claims)


def tier_times(policy: str, rounds: int, seed: int) -> tuple[float, float]:
    """Return a run's seconds by Eq. 6, and as they were.

    The shares of the tiers are those of the rounds drawn: chance in drawing is no error of Eq. 6.
    """
    timed = run_idle(policy, rounds, seed)
    drawn = [tier for tier in timed.tiers if tier is not None]
    shares = np.bincount(drawn, minlength=5) / len(drawn)
    tifl = timed.tifl
    return paper_estimate(tifl.tiers.seconds, shares, rounds), tifl.actual_s


def straggler_chance(num_nodes: int, num_slowest: int, num_selected: int) -> float:
    r"""Compute the probability that a random round holds a node of the slowest level (Eq. 2, 3).

    .. math:: Pr_s = 1 - \binom{|K| - |\tau_m|}{|C|} / \binom{|K|}{|C|}
    """
    return 1 - comb(num_nodes - num_slowest, num_selected) / comb(num_nodes, num_selected)


def straggler_bound(num_nodes: int, num_slowest: int, num_selected: int) -> float:
    r"""Bound that probability from below (Theorem 3.1, Eq. 5); they are equal for one node.

    .. math:: Pr_s > 1 - ((|K| - |\tau_m|) / |K|)^{|C|}
    """
    return 1.0 - (1 - num_slowest / num_nodes) ** num_selected


def mape(estimate: Vector, actual: Vector) -> Vector:
    """Compare estimated training times with the actual ones, in percent (Eq. 7)."""
    return np.abs(estimate - actual) / actual * 100


def equation_3(options: Options) -> Finding:
    rounds = options.pick(500, 5000)
    shares = []
    rows = []
    for selected in (1, 2, 5, 10, 20):
        timed = run_idle(VANILLA, rounds, options.seed, selected)
        delayed = float(np.mean(np.diff(timed.ends_s) > DELAYED_S))
        fleet = (50, 10, selected)
        shares.append((delayed, straggler_chance(*fleet), straggler_bound(*fleet)))
        rows.append((selected, *(f"{value:.3f}" for value in shares[-1])))
    measured, exact, bound = np.array(shares).T
    errors = abs(measured - exact)
    allowed = 4 * np.sqrt(exact * (1 - exact) / rounds)
    above = min(exact[1:] - bound[1:])
    claims = [
        fact("Eq. 3 gives the share of rounds that a slowest client delays (within 4 standard "
              "errors of the count)", "1 - C(K - m, C) / C(K, C)",
              f"largest difference {max(errors):.3f}", all(errors <= allowed)),
        made("it exceeds the bound of Eq. 5", "by Theorem 3.1", f"by {above:.3f} at least",
              above > 0),
        made("with many clients a round it is nearly 1 (here 20 of 50, above 0.99)", "about 1",
              f"{exact[-1]:.4f}", exact[-1] > 0.99),
    ]  # fmt: skip
    return Finding(("clients a round", "share of rounds", "Eq. 3", "Eq. 5"), rows, claims)


class RoundTimes(Wrapper):
    """Note when each round ends, and the tier that trained in it."""

    def __init__(self, strategy: TiFL) -> None:
        super().__init__(strategy)
        self.tifl = strategy
        self.ends_s: list[float] = []
        self.tiers: list[int | None] = []

    def on_round_end(self, run: Run, record: dict[str, Any]) -> None:
        self.ends_s.append(record["virtual_s"])
        self.tiers.append(record["tifl"]["tier"])


def run_idle(policy: str, rounds: int, seed: int, per_round: int = 5) -> RoundTimes:
    """Run rounds on the paper's 50 nodes, each of which reports the work of 100 examples."""
    strategy = TiFL(
        FedAvg(fraction_evaluate=0.0),
        per_round,
        policy=policy,
        seed=seed,
        profiling="phase",
        sync_rounds=5,
        warmup_rounds=0,
    )
    timed = RoundTimes(strategy)
    grid = LocalGrid(idle_app(), Plan(CIFAR_CPUS).fleet, seed=seed)
    timed.start(grid, ArrayRecord([np.zeros(1)]), num_rounds=rounds)
    return timed


def idle_app() -> ClientApp:
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        metrics = MetricRecord({keys.NUM_EXAMPLES: 100})
        arrays = message.content.array_records["arrays"]
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    app.train()(answer)
    app.train("profile")(answer)
    return app

"""Experiments without a model: herding of random vectors, and the server's memory."""

import tracemalloc
from collections.abc import Sequence

import numpy as np

from flwr_hetero.cd_grab.algorithm import Vectors, herding_bound
from flwr_hetero_studies.core.criteria import PAIRS, fact, higher, times, within
from flwr_hetero_studies.core.experiment import Finding
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.cd_grab.orders import (
    BAL,
    CD_GRAB,
    D_RR,
    PAIR_BAL,
    make_orders,
    visits,
)

LAST = 3
"""Passes at the end whose mean is a result."""


def slope(x: Sequence[int], y: Sequence[float]) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


FLEETS = (5, 10, 20, 50, 100)
PUBLISHED = {
    D_RR: (350, 0, 0, 0, 0), BAL: (4.2, 5.8, 8.5, 12.5, 17.5),
    PAIR_BAL: (6, 8.5, 12, 18, 23.5), CD_GRAB: (2.6, 2.5, 2.5, 2.3, 2.3),
}  # fmt: skip
"""By the number of workers; 0 where the plot cannot be read."""


def unit_vectors(num_vectors: int, num_workers: int, seed: int) -> Vectors:
    """Draw 16 numbers uniformly from [0, 1], centre them, give them length 1, and divide them."""
    vectors = np.random.default_rng(seed).random((num_vectors, 16))
    vectors -= vectors.mean(axis=0)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    # an even number; a few vectors are left out
    units = num_vectors // num_workers // 2 * 2
    return vectors[: num_workers * units].reshape(num_workers, units, 16)


def beside(published: float) -> str:
    return f"({published:g})" if published else ""


def figure_10(options: Options) -> Finding:
    num_vectors, passes = options.pick((32_768, 12), (1_000_000, 15))
    seeds = options.seeds_or(range(PAIRS))
    # seeds, numbers of workers, passes
    bounds = {method: np.empty((len(seeds), len(FLEETS), passes)) for method in PUBLISHED}
    for number, seed in enumerate(seeds):
        options.say(f"seed {seed}")
        for column, workers in enumerate(FLEETS):
            vectors = unit_vectors(num_vectors, workers, seed)
            for method, table in bounds.items():
                orders = visits(vectors, method, seed)
                table[number, column] = [
                    herding_bound(vectors, next(orders)) for _ in range(passes)
                ]
    ends = {method: table[:, :, -LAST:].mean(2) for method, table in bounds.items()}
    rows = []
    for method, end in ends.items():
        pairs = zip(end.mean(0), PUBLISHED[method], strict=True)
        rows.append([method, *(f"{here:.3g} {beside(paper)}" for here, paper in pairs)])
    growth = {method: end[:, -1] / end[:, 0] for method, end in ends.items()}
    powers = [[slope(FLEETS, row) for row in ends[x]] for x in (BAL, PAIR_BAL)]
    # Lemma 1: Reorder takes the bound half-way to that of Balance
    halved = (bounds[CD_GRAB][:, :, 1] / bounds[CD_GRAB][:, :, 0]).T
    claims = [
        higher("coordinated, the bound is the smallest with any number of workers (percent)", "yes",
               *(100 * (1 - ends[CD_GRAB] / np.min([ends[x] for x in (BAL, PAIR_BAL, D_RR)], 0)).T),
               form="+.0f"),
        within("and does not grow with the workers: at most 1.25 times from 5 to 100",
               "0.9 times", growth[CD_GRAB], high=1.25, form=".2f"),
        times("without coordination it grows: by Balance", 4.2, growth[BAL]),
        times("and by PairBalance", 3.9, growth[PAIR_BAL]),
        within("linearly (section 5): with a power of at least 0.8", "1", *powers, low=0.8,
               form=".2f"),
        within("a pass of PairBalance halves the bound (Lemma 1): to 0.4 to 0.6 of it", "0.5",
               *halved, low=0.4, high=0.6, form=".2f"),
    ]  # fmt: skip
    return Finding(["order", *(f"{m} workers" for m in FLEETS)], rows, claims)


NUMBERS = 1_070_000
"""Parameters of the paper's LSTM, 4.1 MiB."""
WORKERS = 4


def held(method: str, num_workers: int, num_units: int) -> tuple[float, float]:
    """Measure what orders hold in their second pass, in models: after a pair, and within one."""
    orders = make_orders(method, num_workers, num_units, 0)
    vectors = np.ones((num_workers, 1, NUMBERS), np.float32)
    tracemalloc.start()
    try:
        for _ in range(num_units):
            orders.observe(vectors)
        orders.start_pass()
        models = []
        for _ in range(num_units - 1):
            orders.observe(vectors)
            models.append(tracemalloc.get_traced_memory()[0] / (4 * NUMBERS))
    finally:
        tracemalloc.stop()
    return models[-2], models[-1]


def figure_8(options: Options) -> Finding:
    (after, within), (longer, _) = (held(CD_GRAB, WORKERS, units) for units in (4, 12))
    (pairs, _), (mean, _) = (held(method, 1, 4) for method in (PAIR_BAL, BAL))
    parts = [
        ("model", 1.0, "4"),
        (f"gradients of a step, {WORKERS} workers", WORKERS, "16.51"),
        ("order server, after a pair", after, "4"),
        ("order server, between the steps of a pair", within, ""),
        ("PairBalance on one worker, after a pair", pairs, "4"),
        ("Balance on one worker", mean, "12"),
    ]
    mib = 4 * NUMBERS / 2**20
    rows = [[name, f"{size * mib:.2f}", f"{size:.2f}", paper] for name, size, paper in parts]
    growth = longer / after - 1
    claims = [
        fact("the order server holds one accumulator of the model's size: at most 1.1", "1",
              f"{after:.2f}", after <= 1.1),
        fact("Balance holds three where PairBalance holds one: at least 2.7 times as much", "3",
              f"{mean / pairs:.2f}", mean >= 2.7 * pairs),
        fact("memory does not depend on the number of examples: 12 units instead of 4 change it "
              "by at most 1 %", "no", f"{growth:+.2%}", abs(growth) <= 0.01),
        fact("it needs that accumulator only, also between the steps of a pair: at most 1.1", "1",
              f"{within:.2f}", within <= 1.1),
    ]  # fmt: skip
    return Finding(["held", "MiB here", "models here", "MiB in the paper"], rows, claims)

"""CD-GraB against random reshuffling and against orders that each worker finds alone, in training.

The claims are the paper's sentences: section 5 and appendices D.1 to D.3.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np

from flwr_hetero_studies.core.criteria import PAIRS, at_scale, higher, times, within
from flwr_hetero_studies.core.curves import Columns, Vector
from flwr_hetero_studies.core.experiment import Finding
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.core.tables import spread
from flwr_hetero_studies.papers.cd_grab import tasks
from flwr_hetero_studies.papers.cd_grab.orders import BAL, CD_GRAB, D_RR, ONCE, PAIR_BAL
from flwr_hetero_studies.papers.cd_grab.tasks import OrderTask
from flwr_hetero_studies.papers.cd_grab.train import Schedule, train

Runs: TypeAlias = dict[str, list[Columns]]
"""Method to a curve per seed."""
LAST = 3
"""A result is the mean of so many epochs at the end."""
MOSTLY = 0.9
"""Share of the epochs in which a curve lies below another to be consistently below."""
METRICS = {"accuracy": (4, True), "perplexity": (2, False), "smape": (4, False)}
"""Digits to print, and whether more is better."""
SMOOTHER = 0.8
"""Part of the other curve's jumps that a smoother curve has at most."""


IMAGE_GRID = (1e-2, 5e-3, 1e-3, 5e-4, 1e-4)
"""Rates of appendix D.1.3; those of other tasks (D.1.1, D.2.1) stand in their figures."""


def race(options: Options, task: OrderTask, settings: Schedule, methods: Sequence[str]) -> Runs:
    """Train a curve per method and seed, at the rate of ``settings``."""
    runs: Runs = {method: [] for method in methods}
    for seed in options.seeds_or(range(PAIRS)):
        for method, curves in runs.items():
            options.say(f"{settings.workers} workers, lr {settings.lr:g}, seed {seed}: {method}")
            curves.append(train(task, settings, method, seed))
    return runs


def tuned(options: Options, task: OrderTask, settings: Schedule, grid: Sequence[float]) -> Schedule:
    """Give all orders the rate at which D-RR, with the first seed, tests best (D.1.1, D.3)."""
    _, more_is_better = METRICS[task.metric]
    scores = {}
    for lr in grid:
        options.say(f"D-RR at {lr:g}")
        (value,) = ends([train(task, replace(settings, lr=lr), D_RR, options.seed)], "metric")
        scores[lr] = np.nan_to_num(value if more_is_better else -value, nan=-np.inf)
    return replace(settings, lr=max(grid, key=scores.__getitem__))


def ends(curves: Sequence[Columns], name: str) -> Vector:
    return np.array([np.mean(curve[name][-LAST:]) for curve in curves])


def lower(runs: Runs, method: str, other: str = D_RR, name: str = "loss") -> Vector:
    """Return by how many percent a method ends below another one, seed by seed."""
    return 100 * (1 - ends(runs[method], name) / ends(runs[other], name))


def cells(curves: Sequence[Columns], digits: int = 4) -> list[str]:
    form = f".{digits}f"
    losses = ends(curves, "loss")
    values = ends(curves, "metric")
    return [spread(losses.tolist(), ".5f", ".5f"), spread(values.tolist(), form, form)]


def jumps(curves: Sequence[Columns]) -> Vector:
    """Measure how unsteady each curve is: second differences in its later half."""
    return np.array([np.diff(c["loss"][len(c["loss"]) // 2 :], 2).std() for c in curves])


class Published(NamedTuple):
    """The ends of the paper's curves: loss and metric, with CD-GraB and with D-RR."""

    loss: tuple[float, float]
    metric: tuple[float, float]


def against_reshuffling(
    options: Options,
    task: OrderTask,
    settings: Schedule,
    grid: Sequence[float],
    published: Published,
    is_smooth: bool = True,
) -> Finding:
    """Compare CD-GraB with D-RR; jumps are only judged if ``is_smooth``.

    The loss must have bent before the later half of the run: the bend would count as jumps.
    """
    settings = tuned(options, task, settings, grid)
    runs = race(options, task, settings, (CD_GRAB, D_RR))
    digits, more_is_better = METRICS[task.metric]
    rows = []
    for (method, curves), loss, value in zip(runs.items(), *published, strict=True):
        our_loss, our_value = cells(curves, digits)
        unsteady = f"{1e3 * jumps(curves).mean():.3f}"
        rows.append([method, f"{settings.lr:g}", our_loss, loss, our_value, value, unsteady])
    better = ends(runs[CD_GRAB], "metric") - ends(runs[D_RR], "metric")
    pairs = zip(runs[CD_GRAB], runs[D_RR], strict=True)
    # from the first learnt order on
    shares = [np.mean(np.less(a["loss"], b["loss"])[2:]) for a, b in pairs]
    less, more = published.loss
    sign = 1 if more_is_better else -1
    claims = [
        higher(f"training loss at the end below D-RR's, mean of the last {LAST} epochs",
               f"{less} < {more}", lower(runs, CD_GRAB), size=100 * (1 - less / more), unit=" %"),
        within(f"consistently: in at least {MOSTLY:.0%} of the epochs", "all", shares,
               low=MOSTLY, form=".2f"),
        higher(f"better test {task.metric} at the end", "{} against {}".format(*published.metric),
               sign * better, size=abs(published.metric[0] - published.metric[1]),
               form=f"+.{digits + 1}f"),
        at_scale(within(f"smoother: the loss jumps at most {SMOOTHER} times as much",
                        "much smoother", jumps(runs[CD_GRAB]) / jumps(runs[D_RR]), high=SMOOTHER,
                        form=".2f"), is_smooth),
    ]  # fmt: skip
    head = ["order", "lr", "training loss", "paper", task.metric, "paper", "jumps, 1/1000"]
    return Finding(head, rows, claims)


def figure_3a(options: Options) -> Finding:
    task = tasks.table(*options.pick((6400, 10_000), (195_285, 48_822)))
    settings = Schedule(4, 16, options.pick(12, 50), 5e-3)
    published = Published((0.3355, 0.3372), (0.8237, 0.8215))
    return against_reshuffling(options, task, settings, (1e-2, 5e-3, 1e-3), published)


def figure_3b(options: Options) -> Finding:
    task = tasks.given(
        options.dataset("texts"), "lstm-lm", options.pick(160, 10**6), task="language-model",
        per_unit=4, metric="perplexity", num_tests=options.pick(400, 10_000),
    )  # fmt: skip
    epochs = options.pick(10, 50)
    settings = Schedule(4, 4, epochs, 0.5, decay_every=epochs // 5)
    published = Published((5.311, 5.361), (223.5, 232.0))
    grid = (0.1, 0.5, 2.0)
    return against_reshuffling(options, task, settings, grid, published, not options.fast)


def figure_3c(options: Options) -> Finding:
    task = tasks.given(
        options.dataset("series"), "ar-mlp", options.pick(2048, 10**6), task="forecasting",
        metric="smape",
    )  # fmt: skip
    published = Published((0.0905, 0.0920), (0.0851, 0.0886))
    settings = Schedule(32, 32, 30, 1e-3)
    return against_reshuffling(options, task, settings, (1e-2, 1e-3, 1e-4), published)


def figure_11(options: Options) -> Finding:
    workers, epochs = options.pick((16, 8), (64, 30))
    task = tasks.given(
        options.dataset("texts"), "gpt", options.pick(16 * 30, 10**6), task="language-model",
        metric="perplexity", num_tests=options.pick(400, 10_000),
    )  # fmt: skip
    settings = Schedule(workers, workers, epochs, 5e-4, weight_decay=1e-4, adam=True)
    published = Published((4.098, 4.105), (66.1, 66.5))
    grid = (5e-3, 1e-3, 5e-4, 1e-4)
    return against_reshuffling(options, task, settings, grid, published, not options.fast)


# --- Figures 4, 9 and 12, appendix B.4: on images ---------------------------------------------

ALL = (CD_GRAB, PAIR_BAL, BAL, D_RR, ONCE)


def on_images(options: Options) -> tuple[OrderTask, Schedule]:
    """Train LeNet on the given images, or the small network on the embedded ones (D.1.3)."""
    model = "lenet" if options.data else "cnn"
    task = tasks.given(options.dataset("images"), model, options.pick(1437, 50_000))
    # 64 units a step with any number of workers
    return task, Schedule(64, 64, options.pick(20, 100), 1e-3, weight_decay=1e-2)


def by_workers(
    options: Options, fleets: Sequence[int], methods: Sequence[str], epochs: int = 0
) -> tuple[float, dict[int, Runs]]:
    """Return the rate, which does not depend on the workers as it is D-RR's, and the runs."""
    task, settings = on_images(options)
    settings = tuned(options, task, settings, IMAGE_GRID)
    settings = replace(settings, epochs=epochs or settings.epochs)
    runs = {m: race(options, task, replace(settings, workers=m), methods) for m in fleets}
    return settings.lr, runs


def figure_4(options: Options) -> Finding:
    fleets = options.pick((4, 64), (4, 8, 16, 32, 64))
    lr, runs = by_workers(options, fleets, ALL)
    published = {(64, CD_GRAB): "0.65, 67.9 %", (64, D_RR): "0.70, 66.0 %",
                 (4, BAL): "near CD-GraB", (4, PAIR_BAL): "near CD-GraB",
                 (64, BAL): "near D-RR", (64, PAIR_BAL): "near D-RR"}  # fmt: skip
    rows = [
        [m, f"{lr:g}", method, *cells(curves), published.get((m, method), "")]
        for m, runs_of_fleet in runs.items()
        for method, curves in runs_of_fleet.items()
    ]
    few = runs[fleets[0]]
    many = runs[fleets[-1]]
    gains = {m: lower(runs_of_fleet, CD_GRAB) for m, runs_of_fleet in runs.items()}
    # section 5: without coordination orders err independently
    alone = [(lower(fleet, BAL) + lower(fleet, PAIR_BAL)) / 2 for fleet in (few, many)]
    leads = [
        np.minimum(lower(fleet, CD_GRAB, BAL), lower(fleet, CD_GRAB, PAIR_BAL))
        for fleet in (few, many)
    ]
    claims = [
        higher("CD-GraB's training loss is below D-RR's with any number of workers", "yes",
               *gains.values(), unit=" %"),
        higher("with 64 workers by as much as in the paper", "0.65 < 0.70", gains[fleets[-1]],
               size=100 * (1 - 0.65 / 0.70), unit=" %"),
        higher("with more workers CD-GraB leads the best order without coordination by more", "yes",
               leads[1] - leads[0], unit=" points"),
        higher("with more workers ID-GraB comes close to D-RR: its gain falls by half or more",
               "yes", alone[0] / 2 - np.abs(alone[1]), unit=" points"),
    ]  # fmt: skip
    head = ["workers", "lr", "order", "training loss", "accuracy", "paper"]
    return Finding(head, rows, claims)


def appendix_b4(options: Options) -> Finding:
    names = {PAIR_BAL: "GraB by PairBalance", BAL: "GraB by Balance", D_RR: "random reshuffling"}
    lr, by_fleet = by_workers(options, (1,), tuple(names))
    runs = by_fleet[1]
    claims = [
        higher("both outperform reshuffling: less training loss at the end", "yes",
               lower(runs, PAIR_BAL), lower(runs, BAL), unit=" %"),
        within("Balance and PairBalance converge alike: losses within 5 %", "similar",
               lower(runs, PAIR_BAL, BAL), low=-5, high=5, unit=" %"),
    ]  # fmt: skip
    rows = [[names[method], f"{lr:g}", *cells(curves)] for method, curves in runs.items()]
    return Finding(["order", "lr", "training loss", "accuracy"], rows, claims)


def figure_9(options: Options) -> Finding:
    fleets = options.pick((4, 64), (4, 8, 16, 32, 64))
    _, runs = by_workers(options, fleets, ALL[:4], options.pick(12, 100))
    bounds = [{x: ends(fleet[x], "herding") for x in ALL[:4]} for fleet in runs.values()]
    published = {CD_GRAB: "95 at any", PAIR_BAL: "100 at 4, 115 at 64",
                 BAL: "100 at 4, 115 at 64", D_RR: "115 at any"}  # fmt: skip
    rows = [[x, *(f"{bound[x].mean():.1f}" for bound in bounds), published[x]] for x in ALL[:4]]
    # both kinds of ID-GraB, as the paper speaks of them together
    few, many = ((bound[BAL] + bound[PAIR_BAL]) / 2 for bound in (bounds[0], bounds[-1]))
    claims = [
        higher("CD-GraB's bound is below all others' with any number of workers (percent)", "yes",
               *(100 * (1 - bound[CD_GRAB] / np.min([bound[x] for x in ALL[1:4]], axis=0))
                 for bound in bounds), form="+.0f"),
        times("without coordination it grows with the workers, from 4 to 64", 1.15, many / few),
        at_scale(within("and ends at D-RR's: within 10 % of it with the most workers", "equal",
                        many / bounds[-1][D_RR], low=0.9, high=1.1, form=".2f"),
                 not options.fast),
    ]  # fmt: skip
    head = ["order", *(f"{m} workers" for m in fleets), "paper"]
    return Finding(head, rows, claims)


def figure_12(options: Options) -> Finding:
    low = 1e-3
    high = 1e-2
    published = {(low, CD_GRAB): "0.65, 67.9 %", (low, D_RR): "0.70, 66.0 %",
                 (high, CD_GRAB): "0.89, 66.6 %", (high, D_RR): "1.04, 61.3 %"}  # fmt: skip
    task, settings = on_images(options)
    runs = {
        lr: race(options, task, replace(settings, lr=lr), (CD_GRAB, D_RR)) for lr in (low, high)
    }
    rows = [
        [f"{lr:g}", method, *cells(curves), published[lr, method]]
        for lr, at_rate in runs.items()
        for method, curves in at_rate.items()
    ]
    gains = {lr: lower(at_rate, CD_GRAB) for lr, at_rate in runs.items()}
    right = {method: 100 * ends(curves, "metric") for method, curves in runs[high].items()}
    claims = [
        higher("at 1e-3 CD-GraB's training loss is below D-RR's", "0.65 < 0.70", gains[low],
               size=100 * (1 - 0.65 / 0.70), unit=" %"),
        higher("and at 1e-2", "0.89 < 1.04", gains[high], size=100 * (1 - 0.89 / 1.04), unit=" %"),
        higher("at 1e-2 its accuracy is above", "66.6 % > 61.3 %", right[CD_GRAB] - right[D_RR],
               size=5.3, unit=" points"),
        higher("its gain in loss is larger at 1e-2 than at 1e-3", "14 % against 7 %",
               gains[high] - gains[low], size=7, unit=" points"),
    ]  # fmt: skip
    head = ["learning rate", "order", "training loss", "accuracy", "paper"]
    return Finding(head, rows, claims)

"""CD-GraB against random reshuffling and against orders that each worker finds alone, in training.

The claims are the paper's sentences: section 5 and appendices D.1 to D.3.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from flwr_hetero_studies.core.curves import Columns, mean
from flwr_hetero_studies.core.experiment import Claim, Finding
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.core.tables import spread
from flwr_hetero_studies.papers.cd_grab import tasks
from flwr_hetero_studies.papers.cd_grab.orders import BAL, CD_GRAB, D_RR, ONCE, PAIR_BAL
from flwr_hetero_studies.papers.cd_grab.tasks import OrderTask
from flwr_hetero_studies.papers.cd_grab.train import Schedule, train

Runs: TypeAlias = dict[str, list[Columns]]
"""Method to a curve per seed."""
LAST = 3
"""Epochs at the end whose mean is a result."""
MOSTLY = 0.9
"""Share of the epochs in which a curve lies below another to be consistently below."""
METRICS = {"accuracy": (4, True), "perplexity": (2, False), "smape": (4, False)}
"""Digits to print, and whether more is better."""
SMOOTHER = 0.8
"""Part of the other curve's jumps that a smoother curve has at most."""


def race(
    options: Options, task: OrderTask, settings: Schedule, methods: Sequence[str], seeds: int
) -> Runs:
    runs: Runs = {method: [] for method in methods}
    for seed in range(options.seed, options.seed + seeds):
        for method, curves in runs.items():
            options.say(f"{settings.workers} workers, lr {settings.lr:g}, seed {seed}: {method}")
            curves.append(train(task, settings, method, seed))
    return runs


def ends(curves: Sequence[Columns], name: str) -> list[float]:
    return [float(np.mean(curve[name][-LAST:])) for curve in curves]


def final(runs: Runs, name: str = "loss") -> dict[str, float]:
    return {method: float(np.mean(ends(curves, name))) for method, curves in runs.items()}


def cells(curves: Sequence[Columns], digits: int = 4) -> list[str]:
    form = f".{digits}f"
    losses, values = ends(curves, "loss"), ends(curves, "metric")
    return [spread(losses, ".5f", ".5f"), spread(values, form, form)]


def jumps(curves: Sequence[Columns]) -> float:
    """Measure how unsteady curves are: second differences in their later half."""
    later = [np.diff(curve["loss"][len(curve["loss"]) // 2 :], 2) for curve in curves]
    return float(np.mean([each.std() for each in later]))


class Published(NamedTuple):
    """What the paper's plots end at: loss and metric, with CD-GraB and with D-RR."""

    loss: tuple[str, str]
    metric: tuple[str, str]


def against_reshuffling(
    options: Options, task: OrderTask, settings: Schedule, seeds: int, published: Published
) -> Finding:
    runs = race(options, task, settings, (CD_GRAB, D_RR), seeds)
    digits, more_is_better = METRICS[task.metric]
    rows = []
    for (method, curves), loss, value in zip(runs.items(), *published, strict=True):
        own_loss, own_value = cells(curves, digits)
        rows.append([method, own_loss, loss, own_value, value, f"{1e3 * jumps(curves):.3f}"])
    losses, values = ([*final(runs, name).values()] for name in ("loss", "metric"))
    ours, theirs = (np.array(mean(runs[x], "loss"))[2:] for x in (CD_GRAB, D_RR))
    # from the first learnt order on
    share = float(np.mean(ours < theirs))
    # section 5: "much smoother"
    ratio = jumps(runs[CD_GRAB]) / jumps(runs[D_RR])
    claims = [
        Claim(f"training loss at the end below D-RR's, mean of the last {LAST} epochs",
              " < ".join(published.loss), f"{losses[0]:.5f}, {losses[1]:.5f}",
              losses[0] < losses[1]),
        Claim(f"consistently: in at least {MOSTLY:.0%} of the epochs", "all", f"{share:.0%}",
              share >= MOSTLY),
        Claim(f"better test {task.metric} at the end", " against ".join(published.metric),
              f"{values[0]:.{digits}f}, {values[1]:.{digits}f}",
              (values[0] > values[1]) == more_is_better and values[0] != values[1]),
        Claim(f"smoother: the loss jumps at most {SMOOTHER} times as much", "much smoother",
              f"{ratio:.2f} times", ratio <= SMOOTHER),
    ]  # fmt: skip
    head = ["order", "training loss", "paper", task.metric, "paper", "jumps, 1/1000"]
    return Finding(head, rows, claims)


def figure_3a(options: Options) -> Finding:
    task = tasks.table(*options.pick((6400, 10_000), (195_285, 48_822)))
    settings = Schedule(4, 16, options.pick(12, 50), 5e-3)
    published = Published(("0.3355", "0.3372"), ("0.8237", "0.820 to 0.823"))
    return against_reshuffling(options, task, settings, options.pick(3, 5), published)


def figure_3b(options: Options) -> Finding:
    task = tasks.given(
        options.dataset("texts"), "lstm-lm", options.pick(160, 10**6), task="language-model",
        per_unit=4, metric="perplexity", num_tests=options.pick(400, 10_000),
    )  # fmt: skip
    epochs = options.pick(10, 50)
    settings = Schedule(4, 4, epochs, 0.5, decay_every=epochs // 5)
    published = Published(("5.311", "5.361"), ("223.5", "232"))
    return against_reshuffling(options, task, settings, options.pick(2, 5), published)


def figure_3c(options: Options) -> Finding:
    task = tasks.given(
        options.dataset("series"), "ar-mlp", options.pick(2048, 10**6), task="forecasting",
        metric="smape",
    )  # fmt: skip
    settings = Schedule(32, 32, 30, options.pick(1e-2, 1e-3))
    published = Published(("0.0905", "0.0920"), ("0.0851", "0.0886"))
    return against_reshuffling(options, task, settings, options.pick(3, 5), published)


def figure_11(options: Options) -> Finding:
    workers, epochs, lr = options.pick((16, 8, 1e-3), (64, 30, 5e-4))
    task = tasks.given(
        options.dataset("texts"), "gpt", options.pick(16 * 30, 10**6), task="language-model",
        metric="perplexity", num_tests=options.pick(400, 10_000),
    )  # fmt: skip
    settings = Schedule(workers, workers, epochs, lr, weight_decay=1e-4, adam=True)
    published = Published(("4.098", "4.105"), ("66.1", "66.5"))
    return against_reshuffling(options, task, settings, options.pick(2, 3), published)


# --- Figures 4, 9 and 12, appendix B.4: on images ---------------------------------------------

ALL = (CD_GRAB, PAIR_BAL, BAL, D_RR, ONCE)


def on_images(
    options: Options, workers: int, methods: Sequence[str], seeds: int, **changes: Any
) -> Runs:
    """Train LeNet on the given images, or the small network on the embedded ones (D.1.3)."""
    model = "lenet" if options.data else "cnn"
    task = tasks.given(options.dataset("images"), model, options.pick(1437, 50_000))
    # D.1.3; 64 units a step with any number of workers
    epochs, lr = options.pick((20, 1e-2), (100, 1e-3))
    settings = Schedule(workers, 64, epochs, lr, weight_decay=1e-2)
    return race(options, task, replace(settings, **changes), methods, seeds)


def figure_4(options: Options) -> Finding:
    fleets = options.pick((4, 64), (4, 8, 16, 32, 64))
    runs = {m: on_images(options, m, ALL, options.pick(2, 3)) for m in fleets}
    published = {(64, CD_GRAB): "0.65, 67.9 %", (64, D_RR): "0.70, 66.0 %",
                 (4, BAL): "near CD-GraB", (4, PAIR_BAL): "near CD-GraB",
                 (64, BAL): "near D-RR", (64, PAIR_BAL): "near D-RR"}  # fmt: skip
    rows = [
        [m, method, *cells(curves), published.get((m, method), "")]
        for m, found in runs.items()
        for method, curves in found.items()
    ]
    few, many = fleets[0], fleets[-1]
    losses = {m: final(found) for m, found in runs.items()}
    gains = {m: {x: 1 - own[x] / own[D_RR] for x in ALL} for m, own in losses.items()}
    # section 5: without coordination orders err independently
    alone = [(gains[m][BAL] + gains[m][PAIR_BAL]) / 2 for m in (few, many)]
    leads = [1 - losses[m][CD_GRAB] / min(losses[m][BAL], losses[m][PAIR_BAL]) for m in (few, many)]
    claims = [
        Claim("CD-GraB's training loss is below D-RR's with any number of workers", "yes",
              ", ".join(f"{own[CD_GRAB]:+.1%} at {m}" for m, own in gains.items()),
              all(own[CD_GRAB] > 0 for own in gains.values())),
        Claim("with more workers CD-GraB leads the best order without coordination by more", "yes",
              f"{leads[0]:+.1%} at {few}, {leads[1]:+.1%} at {many}", leads[1] > leads[0]),
        Claim("with more workers ID-GraB comes close to D-RR: its gain falls by half or more",
              "yes", f"{alone[0]:+.1%} at {few}, {alone[1]:+.1%} at {many}",
              alone[0] > 0 and abs(alone[1]) <= alone[0] / 2),
    ]  # fmt: skip
    head = ["workers", "order", "training loss", "accuracy", "paper"]
    return Finding(head, rows, claims)


def appendix_b4(options: Options) -> Finding:
    names = {PAIR_BAL: "GraB by PairBalance", BAL: "GraB by Balance", D_RR: "random reshuffling"}
    found = on_images(options, 1, tuple(names), options.pick(2, 3))
    runs = {name: found[method] for method, name in names.items()}
    pairs, mean_of, at_random = final(runs).values()
    claims = [
        Claim("both outperform reshuffling: less training loss at the end", "yes",
              f"{pairs:.5f} and {mean_of:.5f} against {at_random:.5f}",
              max(pairs, mean_of) < at_random),
        Claim("Balance and PairBalance converge alike: losses within 5 %", "similar",
              f"{pairs / mean_of - 1:+.1%}", abs(pairs / mean_of - 1) <= 0.05),
    ]  # fmt: skip
    rows = [[name, *cells(curves)] for name, curves in runs.items()]
    return Finding(["order", "training loss", "accuracy"], rows, claims)


def figure_9(options: Options) -> Finding:
    fleets = options.pick((4, 16, 64), (4, 8, 16, 32, 64))
    changes = {"epochs": options.pick(12, 100)}
    runs = {m: on_images(options, m, ALL[:4], options.pick(1, 3), **changes) for m in fleets}
    bounds = [final(found, "herding") for found in runs.values()]
    of = {method: np.array([bound[method] for bound in bounds]) for method in ALL[:4]}
    published = {CD_GRAB: "95 at any", PAIR_BAL: "100 at 4, 115 at 64",
                 BAL: "100 at 4, 115 at 64", D_RR: "115 at any"}  # fmt: skip
    rows = [[x, *(f"{value:.1f}" for value in of[x]), published[x]] for x in of]
    # both kinds of ID-GraB, as the paper speaks of them together
    alone = (of[BAL] + of[PAIR_BAL]) / 2
    to_drr = alone[-1] / of[D_RR][-1]
    claims = [
        Claim("CD-GraB's bound is below all others' with any number of workers", "yes",
              ", ".join(f"{v:.2f} of D-RR's" for v in of[CD_GRAB] / of[D_RR]),
              all(bool((of[CD_GRAB] < of[x]).all()) for x in ALL[1:4])),
        Claim("without coordination it grows with the workers", "1.15 times",
              f"{alone[-1] / alone[0]:.2f} times", bool(alone[-1] > alone[0])),
        Claim("and ends at D-RR's: within 10 % of it with the most workers", "equal",
              f"{to_drr:.2f} of it", abs(1 - to_drr) <= 0.1),
    ]  # fmt: skip
    head = ["order", *(f"{m} workers" for m in fleets), "paper"]
    return Finding(head, rows, claims)


def figure_12(options: Options) -> Finding:
    low, high = 1e-3, 1e-2
    published = {(low, CD_GRAB): "0.65, 67.9 %", (low, D_RR): "0.70, 66.0 %",
                 (high, CD_GRAB): "0.89, 66.6 %", (high, D_RR): "1.04, 61.3 %"}  # fmt: skip
    seeds = options.pick(2, 3)
    runs = {lr: on_images(options, 64, (CD_GRAB, D_RR), seeds, lr=lr) for lr in (low, high)}
    rows = [
        [f"{lr:g}", method, *cells(curves), published[lr, method]]
        for lr, found in runs.items()
        for method, curves in found.items()
    ]
    losses = {lr: final(found) for lr, found in runs.items()}
    gains = {lr: 1 - own[CD_GRAB] / own[D_RR] for lr, own in losses.items()}
    right = final(runs[high], "metric")
    claims = [
        Claim("at 1e-2 CD-GraB's training loss is still below D-RR's", "0.89 < 1.04",
              f"{gains[high]:+.2%}", gains[high] > 0),
        Claim("and its accuracy above", "66.6 % > 61.3 %",
              f"{right[CD_GRAB]:.4f}, {right[D_RR]:.4f}", right[CD_GRAB] > right[D_RR]),
        Claim("its gain in loss is larger at 1e-2 than at 1e-3", "14 % against 7 %",
              f"{gains[high]:+.2%} against {gains[low]:+.2%}", gains[high] > gains[low]),
    ]  # fmt: skip
    head = ["learning rate", "order", "training loss", "accuracy", "paper"]
    return Finding(head, rows, claims)

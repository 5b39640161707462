"""CD-GraB against random reshuffling and against orders that each worker finds alone, in training.

The claims are the paper's sentences: section 5 and appendices D.1 to D.3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np

from flwr_hetero_studies.core.curves import Columns, mean
from flwr_hetero_studies.core.experiment import Claim, Curve, Finding
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.cd_grab import tasks
from flwr_hetero_studies.papers.cd_grab.orders import BAL, CD_GRAB, D_RR, ONCE, PAIR_BAL
from flwr_hetero_studies.papers.cd_grab.tasks import Task
from flwr_hetero_studies.papers.cd_grab.train import Settings, train

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
    options: Options,
    task: Task,
    settings: Settings,
    methods: Sequence[str],
    seeds: int,
) -> Runs:
    """Train with each method and seed."""
    runs: Runs = {method: [] for method in methods}
    for seed in range(options.seed, options.seed + seeds):
        for method, curves in runs.items():
            options.say(f"{settings.workers} workers, lr {settings.lr:g}, seed {seed}: {method}")
            curves.append(train(task, settings, method, seed))
    return runs


def ends(curves: Sequence[Columns], name: str) -> list[float]:
    """Average the last epochs of each seed."""
    return [float(np.mean(curve[name][-LAST:])) for curve in curves]


def end(curves: Sequence[Columns], name: str) -> float:
    """Average the last epochs of all seeds."""
    return float(np.mean(ends(curves, name)))


def spread(curves: Sequence[Columns], name: str, digits: int) -> str:
    """Write mean and standard deviation over seeds."""
    values = ends(curves, name)
    return f"{np.mean(values):.{digits}f} ± {np.std(values):.{digits}f}"


def jumps(curves: Sequence[Columns]) -> float:
    """Measure how unsteady curves are: second differences in their later half."""
    later = [np.diff(curve["loss"][len(curve["loss"]) // 2 :], 2) for curve in curves]
    return float(np.mean([each.std() for each in later]))


def below(one: Sequence[Columns], other: Sequence[Columns]) -> float:
    """Share of the epochs, from the first learnt order on, in which one mean curve is lower."""
    ours, theirs = (np.array(mean(curves, "loss"))[2:] for curves in (one, other))
    return float(np.mean(ours < theirs))


# --- Figures 3 and 11: against random reshuffling ---------------------------------------------


class Published(NamedTuple):
    """What the paper's plots end at: loss and metric, with CD-GraB and with D-RR."""

    loss: tuple[str, str]
    metric: tuple[str, str]


def against_reshuffling(
    options: Options,
    task: Task,
    settings: Settings,
    seeds: int,
    published: Published,
) -> Finding:
    """Train with CD-GraB and with D-RR, and decide what the paper says of Figure 3."""
    runs = race(options, task, settings, (CD_GRAB, D_RR), seeds)
    metric = task.metric
    digits, more_is_better = METRICS[metric]
    rows = [
        [method, spread(curves, "loss", 5), loss, spread(curves, "metric", digits), value,
         f"{1e3 * jumps(curves):.3f}"]
        for (method, curves), loss, value in zip(runs.items(), *published, strict=True)
    ]  # fmt: skip
    ours, theirs = runs[CD_GRAB], runs[D_RR]
    losses, share = [end(curves, "loss") for curves in (ours, theirs)], below(ours, theirs)
    values = [end(curves, "metric") for curves in (ours, theirs)]
    ratio = jumps(ours) / jumps(theirs)
    claims = [
        Claim(f"training loss at the end below D-RR's, mean of the last {LAST} epochs",
              " < ".join(published.loss), f"{losses[0]:.5f}, {losses[1]:.5f}",
              losses[0] < losses[1]),
        Claim(f"consistently: in at least {MOSTLY:.0%} of the epochs", "all", f"{share:.0%}",
              share >= MOSTLY),
        Claim(f"better test {metric} at the end", " against ".join(published.metric),
              f"{values[0]:.{digits}f}, {values[1]:.{digits}f}",
              (values[0] > values[1]) == more_is_better and values[0] != values[1]),
        Claim(f"smoother: the loss jumps at most {SMOOTHER} times as much", "much smoother",
              f"{ratio:.2f} times", ratio <= SMOOTHER),
    ]  # fmt: skip
    head = ["order", "training loss", "paper", metric, "paper", "jumps, 1/1000"]
    return Finding(head, rows, claims, curves_of(runs), ("epoch", "training loss"))


def curves_of(runs: Mapping[str, Sequence[Columns]], name: str = "loss") -> dict[str, Curve]:
    """Average over seeds; the herding bound begins with the first epoch."""
    start = 1 if name == "herding" else 0
    return {
        method: Curve(mean(curves, "epoch")[start:], mean(curves, name)[start:])
        for method, curves in runs.items()
    }


def figure_3a(options: Options) -> Finding:
    """Logistic regression on a table."""
    task = tasks.table(*options.pick((6400, 10_000), (195_285, 48_822)))
    settings = Settings(4, 16, options.pick(12, 50), 5e-3)
    published = Published(("0.3355", "0.3372"), ("0.8237", "0.820 to 0.823"))
    return against_reshuffling(options, task, settings, options.pick(3, 5), published)


def figure_3b(options: Options) -> Finding:
    """LSTM language model; a worker's unit are four windows."""
    task = tasks.given(
        options.dataset("texts"), "lstm-lm", options.pick(160, 10**6), task="language-model",
        per_unit=4, metric="perplexity", num_tests=options.pick(400, 10_000),
    )  # fmt: skip
    epochs = options.pick(10, 50)
    settings = Settings(4, 4, epochs, 0.5, decay_every=epochs // 5)
    published = Published(("5.311", "5.361"), ("223.5", "232"))
    return against_reshuffling(options, task, settings, options.pick(2, 5), published)


def figure_3c(options: Options) -> Finding:
    """Autoregressive MLP on series."""
    task = tasks.given(
        options.dataset("series"), "ar-mlp", options.pick(2048, 10**6), task="forecasting",
        metric="smape",
    )  # fmt: skip
    settings = Settings(32, 32, 30, options.pick(1e-2, 1e-3))
    published = Published(("0.0905", "0.0920"), ("0.0851", "0.0886"))
    return against_reshuffling(options, task, settings, options.pick(3, 5), published)


def figure_11(options: Options) -> Finding:
    """Pre-train a tiny GPT-2."""
    workers = options.pick(16, 64)
    task = tasks.given(
        options.dataset("texts"), "gpt", options.pick(16 * 30, 10**6), task="language-model",
        metric="perplexity", num_tests=options.pick(400, 10_000),
    )  # fmt: skip
    lr = options.pick(1e-3, 5e-4)
    epochs = options.pick(8, 30)
    settings = Settings(workers, workers, epochs, lr, weight_decay=1e-4, adam=True)
    published = Published(("4.098", "4.105"), ("66.1", "66.5"))
    return against_reshuffling(options, task, settings, options.pick(2, 3), published)


# --- Figures 4, 9 and 12: on images -----------------------------------------------------------

ALL = (CD_GRAB, PAIR_BAL, BAL, D_RR, ONCE)


def image_task(options: Options) -> Task:
    """LeNet on the given images; the small network on the embedded ones."""
    model = "lenet" if options.data else "cnn"
    return tasks.given(options.dataset("images"), model, options.pick(1437, 50_000))


def image_settings(options: Options, workers: int) -> Settings:
    """Take the settings of appendix D.1.3."""
    epochs, lr = options.pick((20, 1e-2), (100, 1e-3))
    return Settings(workers, 64, epochs, lr, weight_decay=1e-2)


def figure_4(options: Options) -> Finding:
    """Ablation: what coordination is worth with few and many workers."""
    task, fleets = image_task(options), options.pick((4, 64), (4, 8, 16, 32, 64))
    runs = {
        workers: race(options, task, image_settings(options, workers), ALL,
                      options.pick(2, 3))
        for workers in fleets
    }  # fmt: skip
    published = {(64, CD_GRAB): "0.65, 67.9 %", (64, D_RR): "0.70, 66.0 %",
                 (4, BAL): "near CD-GraB", (4, PAIR_BAL): "near CD-GraB",
                 (64, BAL): "near D-RR", (64, PAIR_BAL): "near D-RR"}  # fmt: skip
    rows = [
        [m, method, spread(curves, "loss", 5), spread(curves, "metric", 4),
         published.get((m, method), "")]
        for m, found in runs.items()
        for method, curves in found.items()
    ]  # fmt: skip

    def gain(m: int, method: str) -> float:
        """Say by which part a method's loss is below D-RR's."""
        return 1 - end(runs[m][method], "loss") / end(runs[m][D_RR], "loss")

    few, many = fleets[0], fleets[-1]
    gains = {method: [gain(m, method) for m in (few, many)] for method in ALL[:3]}
    alone = np.mean([gains[BAL], gains[PAIR_BAL]], axis=0)
    leads = [1 - end(runs[m][CD_GRAB], "loss") / min(end(runs[m][x], "loss")
             for x in (BAL, PAIR_BAL)) for m in (few, many)]  # fmt: skip
    claims = [
        Claim("CD-GraB's training loss is below D-RR's with any number of workers", "yes",
              ", ".join(f"{gain(m, CD_GRAB):+.1%} at {m}" for m in fleets),
              all(gain(m, CD_GRAB) > 0 for m in fleets)),
        Claim("with more workers CD-GraB leads the best order without coordination by more", "yes",
              f"{leads[0]:+.1%} at {few}, {leads[1]:+.1%} at {many}", leads[1] > leads[0]),
        Claim("with more workers ID-GraB comes close to D-RR: its gain falls by half or more",
              "yes", f"{alone[0]:+.1%} at {few}, {alone[1]:+.1%} at {many}",
              alone[0] > 0 and abs(alone[1]) <= alone[0] / 2),
    ]  # fmt: skip
    head = ["workers", "order", "training loss", "accuracy", "paper"]
    curves = {f"{name}, {many} workers": c for name, c in curves_of(runs[many]).items()}
    return Finding(head, rows, claims, curves, ("epoch", "training loss"))


def appendix_b4(options: Options) -> Finding:
    """Order all data in one place, by Balance and by PairBalance."""
    names = {PAIR_BAL: "GraB by PairBalance", BAL: "GraB by Balance", D_RR: "random reshuffling"}
    runs = race(options, image_task(options), image_settings(options, 1), tuple(names),
                options.pick(2, 3))  # fmt: skip
    rows = [
        [name, spread(runs[method], "loss", 5), spread(runs[method], "metric", 4)]
        for method, name in names.items()
    ]
    pairs, mean_of, at_random = (end(runs[method], "loss") for method in names)
    claims = [
        Claim("both outperform reshuffling: less training loss at the end", "yes",
              f"{pairs:.5f} and {mean_of:.5f} against {at_random:.5f}",
              max(pairs, mean_of) < at_random),
        Claim("Balance and PairBalance converge alike: losses within 5 %", "similar",
              f"{pairs / mean_of - 1:+.1%}", abs(pairs / mean_of - 1) <= 0.05),
    ]  # fmt: skip
    curves = {names[method]: curve for method, curve in curves_of(runs).items()}
    head = ["order", "training loss", "accuracy"]
    return Finding(head, rows, claims, curves, ("epoch", "training loss"))


def figure_9(options: Options) -> Finding:
    """Herding bound of the gradients in training."""
    task, fleets = image_task(options), options.pick((4, 16, 64), (4, 8, 16, 32, 64))
    bounds: dict[str, list[float]] = {method: [] for method in ALL[:4]}
    curves: dict[str, Curve] = {}
    for workers in fleets:
        settings = image_settings(options, workers)
        runs = race(options, task, replace(settings, epochs=options.pick(12, 100)),
                    ALL[:4], options.pick(1, 3))  # fmt: skip
        for method, found in runs.items():
            bounds[method].append(end(found, "herding"))
        curves = curves_of(runs, "herding")
    published = {CD_GRAB: "95 at any", PAIR_BAL: "100 at 4, 115 at 64",
                 BAL: "100 at 4, 115 at 64", D_RR: "115 at any"}  # fmt: skip
    rows = [
        [method, *(f"{value:.1f}" for value in values), published[method]]
        for method, values in bounds.items()
    ]
    of = {method: np.array(values) for method, values in bounds.items()}
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
    return Finding(head, rows, claims, curves, ("epoch", "parallel herding bound"))


def figure_12(options: Options) -> Finding:
    """Learning rates of 1e-3 and 1e-2 with 64 workers."""
    task, rates = image_task(options), (1e-3, 1e-2)
    published = {(1e-3, CD_GRAB): "0.65, 67.9 %", (1e-3, D_RR): "0.70, 66.0 %",
                 (1e-2, CD_GRAB): "0.89, 66.6 %", (1e-2, D_RR): "1.04, 61.3 %"}  # fmt: skip
    settings = image_settings(options, 64)
    runs = {
        lr: race(options, task, replace(settings, lr=lr), (CD_GRAB, D_RR),
                 options.pick(2, 3))
        for lr in rates
    }  # fmt: skip
    rows = [
        [f"{lr:g}", method, spread(curves, "loss", 5), spread(curves, "metric", 4),
         published[lr, method]]
        for lr, found in runs.items()
        for method, curves in found.items()
    ]  # fmt: skip
    ends_of = {lr: [end(found[x], "loss") for x in (CD_GRAB, D_RR)] for lr, found in runs.items()}
    gains = {lr: 1 - ours / theirs for lr, (ours, theirs) in ends_of.items()}
    right = [end(runs[1e-2][x], "metric") for x in (CD_GRAB, D_RR)]
    claims = [
        Claim("at 1e-2 CD-GraB's training loss is still below D-RR's", "0.89 < 1.04",
              f"{gains[1e-2]:+.2%}", gains[1e-2] > 0),
        Claim("and its accuracy above", "66.6 % > 61.3 %", f"{right[0]:.4f}, {right[1]:.4f}",
              right[0] > right[1]),
        Claim("its gain in loss is larger at 1e-2 than at 1e-3", "14 % against 7 %",
              f"{gains[1e-2]:+.2%} against {gains[1e-3]:+.2%}", gains[1e-2] > gains[1e-3]),
    ]  # fmt: skip
    curves = {
        f"{method}, {lr:g}": curve
        for lr, found in runs.items()
        for method, curve in curves_of(found).items()
    }
    head = ["learning rate", "order", "training loss", "accuracy", "paper"]
    return Finding(head, rows, claims, curves, ("epoch", "training loss"))

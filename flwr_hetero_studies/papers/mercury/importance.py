"""Figures 2 to 4 and 6, and the proof of section 4.4: what importance is and what it changes."""

from dataclasses import replace
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from flwr_hetero.mercury import algorithm
from flwr_hetero_studies.core.criteria import PAIRS, about, at_scale, fact, falls, made, within
from flwr_hetero_studies.core.curves import Vector
from flwr_hetero_studies.core.experiment import Finding
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.mercury.clock import MBPS, costs, overlapped_s
from flwr_hetero_studies.papers.mercury.training import RANDOM, Training, cell

FAST_LINKS = (1000, 10_000, 50_000, 100_000)
"""Mbit/s; the paper's data center has the last two."""
MOMENTS = (0, 50, 100, 200)
"""Iterations after which importance is looked at."""
MOST = 2000
"""Gradients are taken of so many samples."""
FEW = 0.15
"""The part of all samples that counts as a small portion."""


def figure_2(options: Options) -> Finding:
    published = {**dict.fromkeys(MBPS, "15 %"), **dict.fromkeys(FAST_LINKS[-2:], "47 %")}
    rows = []
    saved = {}
    for mbps in (*MBPS, *FAST_LINKS):
        cost = costs(mbps)
        step_s = overlapped_s(cost)
        saved[mbps] = 1 - step_s / (cost.compute_s + cost.exchange_s)
        seconds = (f"{part:.2f}" for part in (cost.compute_s, cost.exchange_s, step_s))
        rows.append((mbps, *seconds, f"{saved[mbps]:.0%}", published.get(mbps, "")))
    wireless = max(saved[m] for m in MBPS)
    claims = [
        fact("On wireless links overlapping cuts the cost of a step little", "15 %",
             f"{wireless:.0%} at most", wireless <= 0.15),
        *(about(f"In a data center, {mbps // 1000} Gbit/s, it cuts much", 0.47, [saved[mbps]])
          for mbps in FAST_LINKS[-2:]),
    ]  # fmt: skip
    head = ("Mbit/s", "computing, s", "exchange, s", "overlapped, s", "saved", "paper")
    return Finding(head, rows, claims)


def trained(options: Options, steps: int, seed: int) -> tuple[Training, NDArray[np.int64]]:
    """Train by random batches; return the training and the numbers of all examples."""
    training = Training(cell(options, "images").task, RANDOM, costs(100), seed)
    for _ in range(steps):
        training.advance()
    return training, np.arange(len(training.examples))


def figure_3(options: Options) -> Finding:
    # seeds, moments, columns of the table
    every: list[list[tuple[float, ...]]] = []
    for seed in options.seeds_or(range(PAIRS)):
        training, samples = trained(options, 0, seed)
        every.append([])
        for before, moment in zip((0, *MOMENTS), MOMENTS, strict=False):
            for _ in range(moment - before):
                training.advance()
            losses = np.sort(training.all_losses(samples))[::-1]
            # the loss stands for the gradient's norm (section 4.1)
            shares = np.cumsum(losses) / losses.sum()
            parts = ((np.argmax(shares >= part) + 1) / len(samples) for part in (0.5, 0.9))
            every[-1].append((losses.mean(), *parts))
    rows = [
        (moment, f"{mean:.3f}", f"{half:.1%}", f"{most:.1%}")
        for moment, (mean, half, most) in zip(MOMENTS, np.mean(every, axis=0), strict=True)
    ]
    halves = np.array(every)[:, :, 1].T
    by_moment = {f"{moment}:": half for moment, half in zip(MOMENTS, halves, strict=True)}
    claims = [
        falls("More and more samples become less important as training proceeds (share of them "
              "with half of the importance)", "at each time", by_moment, ".3f"),
        within(f"After 200 iterations a small portion, {FEW:.0%}, has half of the importance",
               "a small portion", halves[-1], high=FEW, form=".3f"),
    ]  # fmt: skip
    head = ("iteration", "mean importance", "samples with half of it", "with 90 %")
    return Finding(head, rows, claims)


def ways_to_draw(losses: Vector, norms: Vector) -> dict[str, Vector]:
    """Return the probabilities of all samples by each way to draw batches."""
    errors = algorithm.error_probability(losses)
    return {
        "random": np.full(len(losses), 1.0 / len(losses)),
        "by loss (the paper)": algorithm.mixed_probs(losses, 0.0),
        "by gradient norm (Eq. 4)": algorithm.mixed_probs(norms, 0.0),
        "by error probability, half uniform (the package)": algorithm.mixed_probs(errors, 0.5),
    }


def figure_4(options: Options) -> Finding:
    every = []
    correlations = []
    for seed in options.seeds_or(range(PAIRS)):
        training, samples = trained(options, MOMENTS[-1], seed)
        samples = samples[:MOST]
        losses = training.all_losses(samples)
        norms = gradient_norms(training, samples)
        ways = ways_to_draw(losses, norms)
        top = np.argsort(-losses)[: len(samples) // 10]
        # second moment of the gradient with the weights that keep it unbiased;
        # a sample without a loss is never drawn, and has no gradient
        noise = [
            float(np.divide(norms**2, p, out=np.zeros_like(p), where=p > 0).mean())
            for p in ways.values()
        ]
        cells = [
            (probs @ losses / losses.mean(), probs[top].sum(), noise[0] / of_way)
            for probs, of_way in zip(ways.values(), noise, strict=True)
        ]
        every.append(np.array(cells))
        # Spearman's
        correlations.append(np.corrcoef(ranks(losses), ranks(norms))[0, 1])
    means = np.mean(every, axis=0)
    rows = [
        (name, f"{importance:.2f}", f"{share:.0%}", f"{gain:.2f}x")
        for name, (importance, share, gain) in zip(ways, means, strict=True)
    ]
    _, share, gain = means[1]
    claims = [
        made("Important samples are more likely to be drawn (the top tenth, at least twice)",
             "more likely", f"{share / 0.1:.1f} times", share >= 0.2),
        within("The loss can stand in for the gradient norm (rank correlation at least 0.8)",
               "often used", correlations, low=0.8, form=".3f"),
        made("It reduces the gradient's second moment, and so its variance", "reduced",
             f"{gain:.2f} times smaller", gain > 1),
    ]  # fmt: skip
    head = ("batches", "importance, mean 1", "draws of the top tenth", "second moment smaller")
    return Finding(head, rows, claims)


def gradient_norms(training: Training, samples: NDArray[np.int64]) -> Vector:
    params = [p for p in training.model.parameters() if p.requires_grad]
    norms = []
    for sample in samples:
        inputs, targets = training.examples.take(np.array([sample]))
        gradients = torch.autograd.grad(cross_entropy(training.model(inputs), targets), params)
        norms.append(float(sum(g.square().sum() for g in gradients) ** 0.5))
    return np.array(norms)


def ranks(values: Vector) -> Vector:
    return np.argsort(np.argsort(values)) / (len(values) - 1)


CHANGES = {(1, 0.05): 0.5, (1, 0.1): 0.7, (10, 0.1): 0.65}
"""Iterations and change of rank, and the part of the samples that the paper has below it."""


def figure_6(options: Options) -> Finding:
    keys = [(step, below) for step in (1, 10) for below in (0.05, 0.1)]
    every = []
    for seed in options.seeds_or(range(PAIRS)):
        training, samples = trained(options, MOMENTS[1], seed)
        moves: dict[int, list[Vector]] = {1: [], 10: []}
        for _ in range(10):
            first = ranks(training.all_losses(samples))
            for step in range(1, 11):
                training.advance()
                if step in moves:
                    moves[step].append(np.abs(ranks(training.all_losses(samples)) - first))
        every.append([np.mean([(m < below).mean() for m in moves[step]]) for step, below in keys])
    rows = []
    claims = []
    # ten iterations are a fortieth of an epoch of CIFAR-10, a fifth of one of the digits
    for (step, below), shares in zip(keys, np.transpose(every), strict=True):
        paper = CHANGES.get((step, below))
        rows.append((step, f"{below:.0%}", f"{shares.mean():.0%}", f"{paper:.0%}" if paper else ""))
        if paper:
            text = f"Samples that change less than {below:.0%} in rank in {step} iterations"
            claims.append(at_scale(about(text, paper, shares), not options.fast))
    head = ("iterations", "change of rank below", "samples", "paper")
    return Finding(head, rows, claims)


SIZES = (4, 10, 6, 20, 8)
"""Sizes of the groups in which the estimators are compared."""
LEVELS = (1.0, 8.0, 0.5, 2.5, 4.0)
"""Mean gradients of the groups."""
BATCH = 8
ERRORS = 4
"""Standard errors that a mean may be off by chance."""


def bias(name: str, batches: int, seed: int) -> tuple[float, float]:
    """Return the bias of an estimator of the mean gradient and its standard error, relative."""
    rng = np.random.default_rng(seed)
    bounds = np.concatenate([[0], np.cumsum(SIZES)])
    gradients = np.repeat(LEVELS, SIZES) + rng.exponential(size=bounds[-1])
    estimates = []
    for number in range(batches):
        # every group is the latest in turn
        groups = algorithm.Groups(np.arange(bounds[-1]), bounds, number % len(SIZES), max(SIZES))
        if name == "paper":
            drawn, weights = algorithm.draw_two_level(gradients, groups, BATCH, 2, rng)
        else:
            drawn = algorithm.draw_flat(gradients, (1, BATCH), 0.5, rng)[0]
            probs = algorithm.mixed_probs(gradients, 0.5)
            weights = algorithm.inverse_probs(probs[drawn], len(gradients))
        estimates.append(float((weights * gradients[drawn]).mean()))
    truth = gradients.mean()
    error = float(np.std(estimates)) / np.sqrt(batches) / truth
    return float(np.mean(estimates)) / truth - 1, error


def section_4_4(options: Options) -> Finding:
    """Check the two parts of the proof: no bias, and the rate with steps of 1 / sqrt(T)."""
    batches = options.pick(5000, 50_000)
    biases = {name: bias(name, batches, options.seed) for name in ("paper", "package")}
    rows = [
        (f"bias, {name}", f"{off:+.1%} (standard error {error:.1%})", "0" * (name == "paper"))
        for name, (off, error) in biases.items()
    ]
    # the package's is shown beside it, the paper's decides
    off, error = biases["paper"]
    lengths = options.pick((16, 64, 256, 1024), (64, 256, 1024, 4096, 16_384))
    seeds = options.seeds_or(range(PAIRS))
    least = np.array([[least_gradient(options, n, seed) for n in lengths] for seed in seeds])
    scaled = least * np.sqrt(lengths)
    rows += [
        (f"least squared gradient norm, T = {n}", f"{one:.2e}, times sqrt(T): {each:.3f}",
         "O(1 / sqrt(T))")
        for n, one, each in zip(lengths, least.mean(0), scaled.mean(0), strict=True)
    ]  # fmt: skip
    claims = [
        fact(f"The mini-batch gradient is unbiased (within {ERRORS} standard errors)", "0",
             f"{off:+.1%}, {abs(off / error):.0f} standard errors", abs(off) <= ERRORS * error),
        within("With steps of 1 / sqrt(T) the least squared norm is O(1 / sqrt(T)): their product "
               f"grows by less than a tenth from T = {lengths[0]}", "bounded",
               scaled.max(1) / scaled[:, 0], high=1.1, form=".2f"),
    ]  # fmt: skip
    return Finding(("figure", "here", "paper"), rows, claims)


def least_gradient(options: Options, length: int, seed: int) -> float:
    """Train softmax regression by Mercury for T steps; return the least squared gradient norm."""
    small = cell(options, "images").task
    task = replace(small, model="softmax", optimizer="sgd", rate=1 / sqrt(length))
    method = replace(RANDOM, sampling="paper", share=1.0)
    training = Training(task, method, costs(100), seed)
    least = np.inf
    params = list(training.model.parameters())
    for step in range(length):
        training.advance()
        if step % max(1, length // 64) == 0 or step == length - 1:
            mean = training.losses(np.arange(len(training.examples))).mean()
            gradients = torch.autograd.grad(mean, params)
            least = min(least, float(sum(g.square().sum() for g in gradients)))
    return least

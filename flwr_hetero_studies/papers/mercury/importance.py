"""Figure 3 and the proof of section 4.4: what importance is, and what it changes."""

from dataclasses import replace

import numpy as np
import torch

from flwr_hetero.mercury.algorithm import (
    Groups,
    draw_flat,
    draw_two_level,
    inverse_probs,
    mixed_probs,
)
from flwr_hetero_studies.core.experiment import Claim, Curve, Finding
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.mercury.clock import costs
from flwr_hetero_studies.papers.mercury.race import cell
from flwr_hetero_studies.papers.mercury.training import RANDOM, Training

MOMENTS = (0, 50, 100, 200)
"""Iterations after which importance is looked at."""
FEW = 0.15
"""Part of the samples that counts as a small portion."""


def figure_3(options: Options) -> Finding:
    """Look at how unequal importance is as random training goes on."""
    training = Training(cell(options, "images").task, RANDOM, costs(100), options.seed)
    samples = np.arange(len(training.examples))
    rows, curves, halves, count = [], {}, [], len(samples)
    for before, moment in zip((0, *MOMENTS), MOMENTS, strict=False):
        for _ in range(moment - before):
            training.advance()
        losses = np.sort(training.all_losses(samples))[::-1]
        # the loss stands for the gradient's norm (section 4.1)
        shares = np.cumsum(losses) / losses.sum()
        half, most = (int(np.argmax(shares >= part)) + 1 for part in (0.5, 0.9))
        halves.append(half / count)
        rows.append((moment, f"{losses.mean():.3f}", f"{halves[-1]:.1%}", f"{most / count:.1%}"))
        places = np.linspace(0, count - 1, 51).astype(int)
        x, y = 100 * (places + 1) / count, 100 * shares[places]
        curves[f"after {moment} iterations"] = Curve(x.tolist(), y.tolist())
    claims = [
        Claim("More and more samples become less important as training proceeds",
              "more at each time", " > ".join(f"{half:.1%}" for half in halves),
              all(np.diff(halves) < 0)),
        Claim(f"After 200 iterations a small portion concentrates importance ({FEW:.0%}, half of "
              "it)", "a small portion", f"{halves[-1]:.1%} hold half", halves[-1] <= FEW),
    ]  # fmt: skip
    head = ("iteration", "mean importance", "samples with half of it", "with 90 %")
    axes = ("samples, % (most important first)", "importance, %")
    return Finding(head, rows, claims, curves, axes)


# --- section 4.4 --------------------------------------------------------------------------------

SIZES, LEVELS, BATCH = (4, 10, 6, 20, 8), (1.0, 8.0, 0.5, 2.5, 4.0), 8
"""Groups, their mean gradients, and the batch, in which the estimators are compared."""
ERRORS = 4
"""Standard errors that a mean may be off by chance."""


def bias(name: str, batches: int, seed: int) -> tuple[float, float]:
    """Return the bias of an estimator of the mean gradient and its standard error, relative."""
    rng = np.random.default_rng(seed)
    bounds = np.concatenate([[0], np.cumsum(SIZES)])
    gradients = np.repeat(LEVELS, SIZES) + rng.exponential(size=bounds[-1])
    found = []
    for number in range(batches):
        # every group is the latest in turn
        groups = Groups(np.arange(bounds[-1]), bounds, number % len(SIZES), max(SIZES))
        if name == "paper":
            drawn, weights = draw_two_level(gradients, groups, BATCH, 2, rng)
        else:
            drawn = draw_flat(gradients, (1, BATCH), 0.5, rng)[0]
            weights = inverse_probs(mixed_probs(gradients, 0.5, drawn), len(gradients))
        found.append(float((weights * gradients[drawn]).mean()))
    truth = gradients.mean()
    return float(np.mean(found)) / truth - 1, float(np.std(found)) / np.sqrt(batches) / truth


def section_4_4(options: Options) -> Finding:
    """Check the two parts of the proof: no bias, and the rate with steps of 1 / sqrt(T)."""
    batches, scaled = options.pick(5000, 50_000), []
    found = {name: bias(name, batches, options.seed) for name in ("paper", "package")}
    rows = [
        (f"bias, {name}", f"{off:+.1%} (standard error {error:.1%})", "0" * (name == "paper"))
        for name, (off, error) in found.items()
    ]
    # the package's is shown beside it, the paper's decides
    off, error = found["paper"]
    lengths = options.pick((16, 64, 256, 1024), (64, 256, 1024, 4096, 16_384))
    for length in lengths:
        least = least_gradient(options, length)
        scaled.append(least * np.sqrt(length))
        text = f"{least:.2e}, times sqrt(T): {scaled[-1]:.3f}"
        rows.append((f"least squared gradient norm, T = {length}", text, "O(1 / sqrt(T))"))
    growth = max(scaled) / scaled[0]
    claims = [
        Claim(f"The mini-batch gradient is unbiased (within {ERRORS} standard errors)", "0",
              f"{off:+.1%}, {abs(off / error):.0f} standard errors", abs(off) <= ERRORS * error),
        Claim("With steps of 1 / sqrt(T) the least squared norm is O(1 / sqrt(T)) (their product "
              "grows by less than a tenth)", "bounded",
              f"at most {growth:.2f} times that of T = {lengths[0]}", growth <= 1.1),
    ]  # fmt: skip
    return Finding(("figure", "here", "paper"), rows, claims)


def least_gradient(options: Options, length: int) -> float:
    """Train softmax regression by Mercury for T steps; return the least squared gradient norm."""
    small = cell(options, "images").task
    task = replace(small, model="softmax", optimizer="sgd", rate=length**-0.5)
    method = replace(RANDOM, sampling="paper", share=1.0)
    training, least = Training(task, method, costs(100), options.seed), np.inf
    params = list(training.model.parameters())
    for step in range(length):
        training.advance()
        if step % max(1, length // 64) == 0 or step == length - 1:
            mean = training.losses(np.arange(len(training.examples))).mean()
            gradients = torch.autograd.grad(mean, params)
            least = min(least, float(sum(g.square().sum() for g in gradients)))
    return least

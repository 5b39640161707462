"""Figure 1, Tables 4 and 5 and Theorem 1."""

import time
from functools import partial

import numpy as np
import torch
from torch import nn

from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero_studies.core.criteria import PAIRS, UNTESTED, Claim, higher, made, times
from flwr_hetero_studies.core.experiment import Finding
from flwr_hetero_studies.core.plan import NotHereError, Options
from flwr_hetero_studies.papers.biased_local_sgd.runs import DECAYS, EPOCHS, PAPER, RESNET20
from flwr_hetero_studies.tasks import Examples, data_shape, load_partition, make_model, train

SETTINGS = ("batch size", "epochs", "learning rate", "decay after", "weight decay")
TABLE_4 = (128, 100, 0.3, (60, 80), 0.0001)
TABLE_5 = (32, 100, 0.1, (60, 80), 0.0001)
"""Settings of CIFAR-10 (ResNet20), the first of five data sets and models."""


def figure_1(options: Options) -> Finding:
    if not torch.cuda.is_available():
        raise NotHereError("needs a GPU beside the CPU")
    dataset = options.dataset("images")
    model = make_model(options.pick("cnn", RESNET20), *data_shape(dataset))
    examples = load_partition(dataset, 0, 1)
    seconds = np.array(
        [[step_s(model, examples, name) for name in ("cpu", "cuda")] for _ in range(PAIRS)]
    )
    claim = times("a step takes longer on the CPU", 10, seconds[:, 0] / seconds[:, 1])
    cpu_ms, cuda_ms = (f"{1000 * mean:.2f}" for mean in seconds.mean(axis=0))
    rows = [("cpu", cpu_ms), ("cuda", cuda_ms)]
    return Finding(("device", "ms per step of 128 examples"), rows, [claim])


def step_s(model: nn.Module, examples: Examples, device: str, num_steps: int = 20) -> float:
    """Return the seconds of a step; the losses come back, so that the device has finished."""
    for warm_up in (True, False):
        start_s = time.perf_counter()
        sampler = UniformSampler(len(examples), 128)
        count = 2 if warm_up else num_steps
        train(model, examples, sampler, num_steps=count, lr=0.01, device=device)
    return (time.perf_counter() - start_s) / num_steps


def settings(options: Options, printed: tuple[object, ...], num_nodes: int) -> Finding:
    given = PAPER[num_nodes]
    decays = tuple(round(EPOCHS * part) for part in DECAYS)
    ours = (given["batch-size"], EPOCHS, given["learning-rate"], decays, given["weight-decay"])
    text = "the full form has the settings of CIFAR-10 (ResNet20)"
    claims = [
        made(text, str(printed), str(ours), printed == ours),
        Claim("and those of four more data sets and models", "four rows", "not had", UNTESTED),
    ]
    rows = list(zip(SETTINGS, printed, ours, strict=True))
    return Finding(("setting", "paper", "here"), rows, claims)


table_4 = partial(settings, printed=TABLE_4, num_nodes=2)
table_5 = partial(settings, printed=TABLE_5, num_nodes=10)


def theorem_1(options: Options) -> Finding:
    """Compare the bound (6) with local SGD on two parabolas, of which one is drawn more often."""
    num_steps = 8
    rounds = options.pick(200, 2000)
    rate = 1 / num_steps  # Lemma 1: at most 1 / (L tau), of parabolas with L = 1
    claims = []
    rows = []
    for chance in (0.5, 0.9, 1.0):
        below = []
        cells = []
        for seed in options.seeds_or(range(PAIRS)):
            mean, gain = parabolas(chance, rate, num_steps, rounds, seed)
            bound = gradient_bound(gain, rate, rounds, num_steps, variance=chance * (1 - chance))
            below.append(bound - mean)
            cells.append((mean, bound))
        rows.append((chance, *(f"{value:.4f}" for value in np.mean(cells, axis=0))))
        text = f"the mean squared gradient is below the bound, sampling {chance:g}"
        claims.append(higher(text, "for any sampling p", below, form=".4f"))
    return Finding(("chance of the second", "mean squared gradient", "bound (6)"), rows, claims)


def gradient_bound(
    decrease: float, rate: float, rounds: int, num_steps: int, variance: float
) -> float:
    r"""Bound the mean squared gradient over rounds (Theorem 1, Eq. 6), for L = 1.

    .. math:: 2 (F(x_0) - F(x_T)) / (\eta T) + L \eta \tau^2 \sigma_p^2

    The paper has it for any sampling p. Its proof drops a positive term.

    >>> gradient_bound(1.0, 0.5, 100, num_steps=2, variance=0.25)
    0.54
    """
    return 2 * decrease / (rate * rounds) + rate * num_steps**2 * variance


def parabolas(
    chance: float, rate: float, num_steps: int, rounds: int, seed: int
) -> tuple[float, float]:
    """Run local SGD on 10 workers from the minimum of F, the mean of x^2 / 2 and (x - 1)^2 / 2.

    Return the mean squared gradient of F over the rounds and F(x_0) - F(x_T).
    """
    rng = np.random.default_rng(seed)
    start = 0.5
    x = start
    squares = []
    for _ in range(rounds):
        local = np.full(10, x)
        for _ in range(num_steps):
            local -= rate * (local - (rng.random(10) < chance))
        x = float(local.mean())
        squares.append((x - start) ** 2)
    return float(np.mean(squares)), -((x - start) ** 2) / 2

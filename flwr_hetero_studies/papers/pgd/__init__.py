"""The experiments of PGD."""

from functools import partial

from flwr_hetero_studies.core.experiment import Experiment
from flwr_hetero_studies.papers.pgd import figures, priorities

MNIST = "MNIST is any set of images of --data, such as Fashion-MNIST."
TIME = (
    "Time is counted in gradients of examples, with those of the first pass. The step is that of "
    "the authors' code, the mean of S plus the mean of T; PGD-S aggregates S."
)
RATE = "The rate is 0.1; the paper gives none."
ONE = "All methods have one rate, as in the authors' code: the best of SGD's 0.03, 0.1 and 0.3."
BIASED = (
    "The first pass over all data costs as much as 50 steps of SGD, before the first step of PGD. "
    "After it the mean gradient of the top examples is not that of all: biased, and too long."
)
DIGITS = "1,437 images of 8x8"
_of = partial(Experiment, "pgd")

EXPERIMENTS: tuple[Experiment, ...] = (
    _of("figure-1", "distribution of priorities, and what the top adds to the loss decrease",
        priorities.figure_1, differs=f"{MNIST} The learning rate is not in the paper: 0.1.",
        cut=f"{DIGITS}.",
        why="The paper looks at iteration 50. Soon after the start the gradients of nearly all "
        "examples still agree, and none stands out."),
    _of("figure-5", "priorities over time", priorities.figure_5,
        differs=f"{MNIST} The learning rate is not in the paper: 0.1. All examples are measured, "
        "not three.",
        cut=f"{DIGITS}; the CNN has kernels of 3x3.",
        why="After a few steps a quarter to a third of the examples have a negative priority: a "
        "step on them alone raises the loss. Eq. 11 has no logarithm for them; the package keeps "
        "the sign (pgd/algorithm.py, learn). On the way through 0 ln |p| moves most."),
    _of("figure-6", "impact of the top ratio k", figures.figure_6,
        differs=f"{TIME} The rate is 1; the paper gives none.",
        cut="4,000 points of 400 numbers and 200 steps instead of 10,000, 1,000 and 10,000.",
        why="The mean gradient of 1% of the points is not that of all: at this rate it needs 17 "
        "times the steps of 30%, each at a quarter of the cost."),
    _of("figure-7", "impact of the renewal ratio r", figures.figure_7, differs=f"{TIME} {RATE}",
        cut="4,000 points of 400 numbers and 200 steps instead of 10,000, 1,000 and 10,000."),
    _of("figure-8", "impact of k and r with a fixed sum", figures.figure_8,
        differs=f"{MNIST} {TIME} {RATE}",
        cut=f"4,000 points of 400 numbers, {DIGITS}, 200 steps."),
    _of("figure-9", "with and without aggressive updates", figures.figure_9,
        differs=f"{MNIST} {TIME} {RATE} k is 1%, r 0.5, 1 and 2%. PGD-S counts as there at its "
        "end where it does not get there, so that the factor is a lower bound.",
        cut=f"{DIGITS}, 200 steps.",
        why="A larger r helps each step, and each step costs more: here the cost wins."),
    _of("figure-10a", "convergence against SGD, MLP", figures.figure_10a,
        differs=f"{MNIST} {TIME} {ONE}",
        cut=f"{DIGITS}, 300 steps.",
        why=BIASED),
    _of("figure-10b", "convergence against SGD, CNN", figures.figure_10b,
        differs=f"{MNIST} {TIME} {ONE}",
        cut=f"{DIGITS}, 300 steps; the CNN has kernels of 3x3.",
        why=BIASED),
    _of("step-length", "why PGD-A is published as faster: a longer step, or another direction",
        figures.step_length,
        differs="Not in the paper: a verdict says whether what changes gains its 1.6x, in steps to "
        f"SGD's loss at nine tenths of its run, at a low rate and at the best of SGD's. {MNIST}",
        cut=f"{DIGITS}, 300 steps; the CNN has kernels of 3x3."),
    _of("figure-11", "scaling to 8 workers", figures.figure_11,
        differs="Synchronous only. Steps to one loss are counted; a step's time is worked out "
        "from a core's time per example and links of 10 Gbit/s, for the paper names neither.",
        cut=f"Steps are counted on {DIGITS}, 200 at most; their time is that of 60,000 of 28x28.",
        why="Each worker picks the top of its own share, and 1% of 180 images are 2."),
)  # fmt: skip

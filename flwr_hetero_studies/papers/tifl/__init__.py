"""The experiments of TiFL, in the order of the paper."""

from functools import partial

from flwr_hetero_studies.core.experiment import Experiment
from flwr_hetero_studies.papers.tifl import figures, times
from flwr_hetero_studies.papers.tifl.runs import BOTH, CREDITS, CUT, FLEET, OPTIMIZER, SMALL

LONGER = CUT.format(100).replace("a small CNN", "an MLP")

_of = partial(Experiment, "tifl")

EXPERIMENTS: tuple[Experiment, ...] = (
    _of("figure-1a", "time per round by CPU share and amount of data", times.figure_1a,
        differs="time of this process on one CPU, divided by the CPU share",
        cut="100 to 1000 digits and a small CNN", seeds=1),
    _of("figure-1b", "accuracy by classes per client", figures.figure_1b,
        differs=f"{OPTIMIZER}; classes are dealt at random, so that 10 of 10 classes is nearly IID",
        cut=SMALL,
        why="With all ten classes a client's data are IID but for their amounts."),
    _of("equation-3", "how often a straggler is in a round (Eq. 2 to 5)", times.equation_3,
        differs="the paper derives it and does not measure it: counted in rounds of 50 emulated "
        "clients", cut="500 rounds instead of 5000", seeds=1),
    _of("table-1", "probabilities of the policies", times.table_1,
        cut="cuts nothing", seeds=1),
    _of("table-2", "estimated and actual training time", times.table_2,
        differs=f"nodes report the work of 100 examples without training; {FLEET}; Eq. 6 has the "
        "tiers' shares of the rounds as they were drawn",
        cut="cuts nothing",
        why="Eq. 6 takes a tier's typical latency where a round waits for the slowest of 5 nodes. "
        "Here the devices of a tier differ by 5 %."),
    _of("figure-3a", "unequal resources", figures.figure_3a, differs=BOTH, cut=SMALL,
        why="By order statistics of the paper's CPU shares uniform is 2.7 times faster than "
        "vanilla, and fast 30."),
    _of("figure-3b", "unequal amounts of data", figures.figure_3b, differs=BOTH, cut=SMALL),
    _of("figure-4", "classes per client", figures.figure_4,
        differs=BOTH,
        cut=f"{SMALL}; 2 classes and IID alone"),
    _of("figure-5", "MNIST and Fashion-MNIST: unequal resources and data", figures.figure_5,
        differs=f"{BOTH}, of which this is one column; two classes per client are dealt, not "
        "shards", cut=SMALL,
        why="With two classes per client accuracies are far from their ends after few rounds."),
    _of("figure-6a", "unequal resources, 5 classes per client", figures.figure_6a,
        differs=BOTH, cut=SMALL),
    _of("figure-6b", "unequal resources, amounts and classes", figures.figure_6b,
        differs=BOTH, cut=SMALL),
    _of("figure-7", "the adaptive policy", figures.figure_7,
        differs=f"{BOTH}; {CREDITS}", cut=LONGER,
        why="The policies' accuracies differ by less than a point, which ten seeds do not settle."),
    _of("figure-8", "the adaptive policy by classes per client", figures.figure_8,
        differs=f"{BOTH}; {CREDITS}", cut=LONGER,
        why="Probabilities change only if the accuracy of the tier that trained last has not "
        "risen."),
    _of("figure-9", "LEAF: many clients of unequal amounts and classes", figures.figure_9,
        differs="not FEMNIST's writers: amounts and classes per client are drawn (Dirichlet 0.5); "
        f"SGD with 0.004 as LEAF has it; {FLEET}; {CREDITS}",
        cut="60 clients, 6 a round, RMSprop; " + SMALL,
        why="Credits decide how much time adaptive takes, and the paper does not print its own."),
)  # fmt: skip

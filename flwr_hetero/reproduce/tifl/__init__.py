"""The experiments of TiFL, in the order of the paper."""

from flwr_hetero.reproduce.experiment import Experiment
from flwr_hetero.reproduce.tifl import adaptive, static, times
from flwr_hetero.reproduce.tifl.runs import BOTH, CREDITS, CUT, FLEET, OPTIMIZER, SMALL

EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        "tifl",
        "figure-1a",
        "time per round by CPU share and amount of data",
        times.figure_1a,
        "time of this process on one CPU, divided by the CPU share",
        "100 to 1000 digits and a small CNN",
    ),
    Experiment(
        "tifl",
        "figure-1b",
        "accuracy by classes per client",
        static.figure_1b,
        f"{OPTIMIZER}; classes are dealt at random, so that 10 of 10 classes is nearly IID",
        SMALL,
    ),
    Experiment(
        "tifl",
        "equation-3",
        "how often a straggler is in a round (Eq. 2 to 5)",
        times.equation_3,
        "the paper derives it and does not measure it: counted in rounds of 50 emulated clients",
        "500 rounds instead of 5000",
    ),
    Experiment(
        "tifl",
        "table-1",
        "probabilities of the policies",
        times.table_1,
        cut="cuts nothing",
    ),
    Experiment(
        "tifl",
        "table-2",
        "estimated and actual training time",
        times.table_2,
        "nodes report the work of 100 examples without training, which changes no time; " + FLEET,
        "cuts nothing",
        "Eq. 6 takes a tier's typical latency where a round waits for the slowest of 5 nodes: too "
        "little by what the devices of a tier differ, 5 % here. Random draws the slowest tier in 1 "
        "of 20 rounds, so that chance moves its time by some percent more. The expected slowest "
        "node leaves chance alone.",
    ),
    Experiment(
        "tifl",
        "figure-3a",
        "unequal resources",
        static.figure_3a,
        BOTH,
        SMALL,
        "In the paper's Table 2 a round of slow takes 90 s and one of uniform 25 s: 6 times that "
        "would be more than always waiting for the slowest tier. By order statistics of its CPU "
        "shares uniform is 2.7 times faster than vanilla, and fast 30 times.",
    ),
    Experiment("tifl", "figure-3b", "unequal amounts of data", static.figure_3b, BOTH, SMALL),
    Experiment(
        "tifl", "figure-4", "classes per client", static.figure_4, BOTH, CUT.format(30, "1 seed")
    ),
    Experiment(
        "tifl",
        "figure-5",
        "MNIST and Fashion-MNIST: unequal resources and data",
        static.figure_5,
        f"{BOTH}, of which this is one column; two classes per client are dealt, not shards",
        SMALL,
        "With two classes per client accuracies are far from their ends after the few rounds of "
        "the short form.",
    ),
    Experiment(
        "tifl",
        "figure-6a",
        "unequal resources, 5 classes per client",
        static.figure_6a,
        BOTH,
        SMALL,
    ),
    Experiment(
        "tifl",
        "figure-6b",
        "unequal resources, amounts and classes",
        static.figure_6b,
        BOTH,
        SMALL,
        "Random, which trains the fastest tier in 7 of 10 rounds, falls as low as fast.",
    ),
    Experiment(
        "tifl",
        "figure-7",
        "the adaptive policy",
        adaptive.figure_7,
        f"{BOTH}; {CREDITS}",
        SMALL,
        "The policies' accuracies differ by less than a point, which two seeds do not settle.",
    ),
    Experiment(
        "tifl",
        "figure-8",
        "the adaptive policy by classes per client",
        adaptive.figure_8,
        f"{BOTH}; {CREDITS}",
        SMALL,
        "Probabilities change only if the accuracy of the tier that trained last has not risen: "
        "with 2 classes that never happens in 30 rounds, and adaptive is uniform. Rounds of one "
        "tier then have fewer different clients than vanilla's.",
    ),
    Experiment(
        "tifl",
        "figure-9",
        "LEAF: many clients of unequal amounts and classes",
        adaptive.figure_9,
        "not FEMNIST's writers: amounts and classes per client are drawn (Dirichlet 0.5); "
        f"SGD with 0.004 as LEAF has it; {FLEET}; {CREDITS}",
        "60 clients, 6 a round, RMSprop; " + SMALL,
        "Credits decide how much time adaptive takes, and the paper does not print its own.",
    ),
)

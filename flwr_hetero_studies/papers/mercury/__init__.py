"""The experiments of Mercury, in the order of the paper."""

from functools import partial

from flwr_hetero_studies.core.experiment import Experiment
from flwr_hetero_studies.papers.mercury import importance, speed

CLOCK = ("seconds are those of ResNet-18 on a Jetson TX1 "
         "behind Wi-Fi, as the emulated fleets have them")  # fmt: skip
RACE = (f"training is real, in one process; {CLOCK}; of groups, 4 of 16 are "
        "drawn from with beta = 1, of which the paper says nothing; a gain "
        "is the geometric mean over targets 0.25, 0.5 and 1 point below "
        "the plateau of standard SGD; ResNet-18 on images wants a GPU")  # fmt: skip
SAME = "clock, groups and gains as in figure-11"
SMALL = "digits, an MLP, batches of 8, 300 steps"
CONDITIONS = ("section-6.2 changes one condition at a time: fewer iterations need fresh scores "
              "and a rate at which noise sets the pace, as Adam at 0.004 (2.2x); less is left with "
              "old scores (1.4x), little by plain SGD (1.2x)")  # fmt: skip
OLD = "a step of 12 devices sees a fifteenth of the digits, so that its noise is small"
LOCAL = ("AdaComm begins with 2 local steps, of which the paper says nothing, as its gains of at "
         "most 1.88 suggest")  # fmt: skip
DIGITS = "digits and an MLP"
_of = partial(Experiment, "mercury")

EXPERIMENTS: tuple[Experiment, ...] = (
    _of("figure-2", "cost of computing and of exchanging gradients, overlapped or not",
        importance.figure_2, differs=f"computed, layer by layer; {CLOCK}", cut="nothing", seeds=1,
        why="at 50 Gbit/s and more the emulated exchange takes next to nothing"),
    _of("figure-3", "importance of samples as training goes on", importance.figure_3, cut=DIGITS),
    _of("figure-4", "batches drawn at random and by importance", importance.figure_4,
        differs="the paper's figure is a drawing: measured, on a model after 200 iterations",
        cut=DIGITS),
    _of("figure-6", "ranks of importance over iterations", importance.figure_6, cut=DIGITS,
        why="ten iterations of the small data are a fifth of an epoch, of CIFAR-10 a fortieth"),
    _of("section-4.4", "proof of correctness: bias of the gradient, and steps of 1 / sqrt(T)",
        importance.section_4_4,
        differs="the paper proves it: counted for 48 samples in five groups, and trained",
        cut="5000 draws, softmax regression on digits, at most 1024 steps",
        why="the proof takes the chosen groups as equally likely, but Eq. 6 prefers the latest"),
    _of("figure-11", "speedup over distributed SGD by data set and bandwidth", speed.figure_11,
        differs=f"{RACE}; {LOCAL}; three of six data sets, numbers in the place of speech",
        cut="digits with an MLP (300 steps), breast-cancer with softmax (60), 2000 texts with a "
        "bag of words (200)",
        why=f"breast-cancer is learnt within ten steps, and on texts no estimator gains "
        f"more than an eighth; {CONDITIONS}"),
    _of("section-6.2", "where fewer iterations come from, one condition at a time",
        speed.section_6_2, differs=f"the paper has the first row only; {SAME}", cut=SMALL,
        why=CONDITIONS),
    _of("figure-12", "accuracy over communication rounds, beside TicTac and AdaComm",
        speed.figure_12, differs=f"{SAME}; 100 Mbit/s, the paper names no link; {LOCAL}",
        cut=SMALL, why=CONDITIONS),
    _of("figure-13", "importance of a group against that of all samples", speed.figure_13,
        differs=f"{SAME}; 100 Mbit/s, a 16th of the data per group, scored before the batch",
        cut=SMALL,
        why="a 16th of a node's data are 22 samples here, of which a batch takes 8"),
    _of("figure-14", "resharding by importance, at random and not at all", speed.figure_14,
        differs=f"{SAME}; 100 Mbit/s; samples move in 20 parts while computing goes on", cut=SMALL,
        why="gradients are averaged after every batch, so where a sample is changes noise only"),
    _of("figure-15", "scoring during the exchange (BACC) or before the batch",
        speed.figure_15, differs=f"{SAME}; 100 Mbit/s", cut=SMALL,
        why="ten seeds do not settle 9 against 10 %"),
    _of("figure-16a", "bandwidth of the testbed's Wi-Fi over time",
        why="it is a record of the authors' router"),
    _of("figure-16b", "speedup with and without adaptation to the bandwidth", speed.figure_16,
        differs=SAME, cut="digits, an MLP, batches of 8, 1000 steps",
        why="a fixed group makes a step 2 to 4 % longer; at 200 Mbit/s an adapted one needs more "
        "steps, by more than that"),
    _of("figure-17", "speedup with 4, 8 and 12 devices", speed.figure_17,
        differs=f"{SAME}; an exchange takes the time of two transfers, by any number of devices",
        cut=f"{SMALL}, 10 and 200 Mbit/s", why=OLD),
    _of("figure-18", "federated learning on non-IID data", speed.figure_18,
        differs=f"{SAME}; a 16th of the data per group, scored before the batch", cut=SMALL,
        why=f"{OLD}, and scores are an epoch old before their group's turn comes again"),
)  # fmt: skip

"""The experiments of biased local SGD, in the order of the paper."""

from functools import partial

from flwr_hetero_studies.core.experiment import Experiment
from flwr_hetero_studies.papers.biased_local_sgd import accuracy, other

DIFFERS = (
    "one data set and model; devices are emulated and links cost nothing, so that synchronous and "
    "balanced local SGD take the same time; lambda, not in the paper, is 0.5"
)
FEW = "Ten seeds do not settle half a point."
CUT = "the digits of scikit-learn, an MLP, 3 epochs, batches of 4 (of 16 on two nodes)"
_of = partial(Experiment, "biased-local-sgd")
_trained = partial(_of, differs=DIFFERS, cut=CUT)
_settings = partial(
    _of,
    differs="of five data sets and models only the first pair is had here",
    cut="cuts nothing",
    seeds=1,
)

EXPERIMENTS: tuple[Experiment, ...] = (
    _of("figure-1", "time of a step on CPU and GPU", other.figure_1,
        differs="another CPU and GPU than the paper's",
        cut="the digits of scikit-learn and a small CNN", why="it needs a GPU beside the CPU",
        seeds=1),
    _of("theorem-1", "convergence for any sampling (Lemma 1, Theorem 1)", other.theorem_1,
        differs="the paper proves it: measured on two parabolas, eta = 1 / (L tau), tau = 8",
        cut="200 rounds instead of 2000",
        why="The proof drops the last term of (11) as negative, but its factor eta (1 - L eta (tau "
        "- 1)) / 2 is positive there. One sample drawn alone leads to its own minimum, where the "
        "gradient of F is not 0."),
    _trained("table-1", "accuracy and time at equal epochs", accuracy.table_1,
             differs=f"{DIFFERS}; BytePS and DLB are not built",
             why="The paper's 8 GPUs spend 97 % of their time in exchanges, which cost nothing "
             "here: with four instead of 160 an epoch they need 38 s, not 1,235."),
    _trained("figure-3", "learning curves", accuracy.figure_3),
    _trained("table-2", "with and without slow nodes", accuracy.table_2,
             why=FEW),
    _trained("table-3", "the biases on 2 slow + 8 fast", accuracy.table_3,
             why="The spread over seeds, 0.7 to 1.7 points, is as large as what the gap costs."),
    _settings("table-4", "settings of 1 + 1", other.table_4),
    _settings("table-5", "settings of 2 + 8", other.table_5),
    _trained("table-6", "ways to divide samples", accuracy.table_6,
             why=f"Three of the four ways gain the same 0.6 points, the fourth 0.4. {FEW}"),
    _trained("figure-4", "each bias alone and both", accuracy.figure_4,
             why="Weights by steps gain 0.9 points here, and sampling none."),
    _trained("table-7", "the biases on 1 slow + 1 fast", accuracy.table_7,
             why=FEW),
)  # fmt: skip

"""The experiments of CD-GraB."""

from functools import partial

from flwr_hetero_studies.core.experiment import Experiment
from flwr_hetero_studies.papers.cd_grab import figures, theory, vectors

ONE = (
    "One process takes the steps of all workers, so that wall-clock time, which the paper also "
    "plots, is not compared. The rate is that of the paper's grid at which D-RR tests best here."
)
IMAGES = "20 epochs instead of 100, on 1,437 images of 8x8 with a CNN of two small layers"
_of = partial(Experiment, "cd-grab")

EXPERIMENTS: tuple[Experiment, ...] = (
    _of("theorem-1", "sums of the random walk of Algorithm 5", theory.theorem_1,
        differs="The bound's constants are derived.",
        cut="20 walks of each length and seed instead of 100.",
        why="From 64 to 4,096 steps a logarithm has a power of 0.17, the walk 0.21."),
    _of("theorem-2", "how gradients fall with epochs and workers", theory.theorem_2,
        differs="The paper proves it. A drawn table of 32 units a worker; the best of three rates.",
        cut="Nothing."),
    _of("figure-3a", "logistic regression on a table, CD-GraB against reshuffling",
        figures.figure_3a,
        differs="The table of mortgage applications is not to be had without a download; one of "
        f"its size is drawn by a rule (18 columns that follow 5 hidden traits). {ONE}",
        cut="6,400 rows and 12 epochs instead of 195,285 and 50.",
        why="Both orders end within 0.05 % of each other, and ten seeds do not settle 0.94 against "
        "0.9 of the epochs."),
    _of("figure-3b", "LSTM language model, CD-GraB against reshuffling", figures.figure_3b,
        differs="A model of characters, not of WikiText-2's words: losses are not comparable. "
        "Windows of 64 characters, width 64; a worker's unit is four windows, and the hidden "
        "state begins with each. Rates tried are 0.1, 0.5 and 2: at the paper's 5 this model "
        f"diverges with either order. {ONE}",
        cut="40 steps an epoch, 10 epochs; the rate falls every 2 epochs.",
        why="In the later half the learning rate has fallen to a hundredth and less, at which the "
        "curve is smooth with either order."),
    _of("figure-3c", "forecasts by an autoregressive MLP, CD-GraB against reshuffling",
        figures.figure_3c,
        differs="Generated series in place of M4's, unless --data has series; a window is scaled "
        f"by its own mean size, so that losses are not comparable. {ONE}",
        cut="2,048 windows.",
        why="Ten seeds do not settle 0.92 against 0.9 of the epochs."),
    _of("figure-4", "LeNet: what coordination adds to ordering, by number of workers",
        figures.figure_4, differs=ONE,
        cut=f"{IMAGES}; 4 and 64 workers.",
        why="Gains scatter by 6 points over seeds, as much as what the workers' number changes."),
    _of("appendix-b4", "ordering in one place: Balance, PairBalance and reshuffling",
        figures.appendix_b4,
        differs="The paper gives no numbers; the settings are those of figure-4.",
        cut=f"{IMAGES}."),
    _of("figure-8", "memory of the order server", vectors.figure_8,
        differs="Memory of the host is counted, not that of a GPU; the orders are those of a run, "
        "the gradients are made up.", cut="Nothing.", seeds=1,
        why="The first gradients of pairs are kept, one per worker, until the second ones are "
        "there. The paper counts the accumulator alone."),
    _of("figure-9", "LeNet: parallel herding bound in training, by number of workers",
        figures.figure_9, differs=ONE,
        cut=f"{IMAGES}; 12 of the 20 epochs; 4 and 64 workers.",
        why="On the small network orders gain more than in the paper: CD-GraB's bound is a fifth "
        "to a half of D-RR's, in the paper five sixths. A worker's own order keeps a part of such "
        "a gain also with 64 workers."),
    _of("figure-10", "parallel herding bound of random vectors, by number of workers",
        vectors.figure_10,
        cut="32,768 vectors and 12 passes instead of 1,000,000 and 15: D-RR's bound goes with the "
        "square root of their number.",
        why="Without coordination the sums of m workers err independently, so that the bound "
        "grows with the square root of m: also in the paper's own figure, 4 times for 20 times "
        "the workers. Its text says linearly."),
    _of("figure-11", "pre-training a tiny GPT-2, CD-GraB against reshuffling", figures.figure_11,
        differs="A model of characters, not of WikiText-103's words, 64 wide instead of 128: "
        f"losses are not comparable. {ONE}",
        cut="16 workers instead of 64, 30 steps an epoch, 8 epochs instead of 30.",
        why="In 8 epochs the loss falls so steeply that the bend of the curve, the same with "
        "either order, counts as most of its jumps."),
    _of("figure-12", "LeNet with 64 workers: learning rates", figures.figure_12, differs=ONE,
        cut="20 epochs on 1,437 images of 8x8, with a CNN of two small layers.",
        why="Accuracies are equal within 0.3 points; losses are not."),
    _of("table-1", "fine-tuning the tiny GPT-2 on GLUE",
        why="GLUE and the pre-trained model need a download. The paper finds no difference between "
        "the orders there."),
)  # fmt: skip

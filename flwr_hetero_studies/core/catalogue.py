"""All experiments, and one by its name."""

from flwr_hetero.errors import check_choice
from flwr_hetero_studies.core.experiment import PAPERS, Experiment
from flwr_hetero_studies.papers import biased_local_sgd, cd_grab, mercury, pgd, tifl

ALL = "all"
EXPERIMENTS: dict[str, tuple[Experiment, ...]] = {
    "tifl": tifl.EXPERIMENTS,
    "biased-local-sgd": biased_local_sgd.EXPERIMENTS,
    "cd-grab": cd_grab.EXPERIMENTS,
    "mercury": mercury.EXPERIMENTS,
    "pgd": pgd.EXPERIMENTS,
}
"""By paper, in the order of its figures and tables."""


def find(paper: str = ALL, name: str = ALL) -> list[Experiment]:
    """Return the experiments of a paper, or one of them.

    A paper may be spelt as its folder, with underscores, and a figure with a space or a dash;
    "figure-3" stands for figure-3a and figure-3b.
    """
    paper, name = (text.lower().replace("_", "-").replace(" ", "-") for text in (paper, name))
    check_choice("paper", paper, (*PAPERS, ALL))
    found = [e for key, group in EXPERIMENTS.items() if paper in (key, ALL) for e in group]
    if name == ALL:
        return found
    parts = [each for each in found if each.name == name or each.name.rstrip("abcd") == name]
    if not parts:
        check_choice("figure", name, [experiment.name for experiment in found])
    return parts

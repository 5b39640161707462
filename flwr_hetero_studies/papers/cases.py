"""Every figure and table of the five papers that one machine can hold, as a case."""

from collections.abc import Iterator
from typing import Any

from flwr_hetero.errors import check_choice
from flwr_hetero_studies.core.experiment import PAPERS, Experiment
from flwr_hetero_studies.core.plan import DIGITS, Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.papers import biased_local_sgd, cd_grab, mercury, pgd, tifl

ALL, FORM = "all", ("full", "fast")
EXPERIMENTS: dict[str, tuple[Experiment, ...]] = {
    "tifl": tifl.EXPERIMENTS,
    "biased-local-sgd": biased_local_sgd.EXPERIMENTS,
    "cd-grab": cd_grab.EXPERIMENTS,
    "mercury": mercury.EXPERIMENTS,
    "pgd": pgd.EXPERIMENTS,
}
"""By paper, in the order of its figures and tables."""
SETTINGS: dict[str, Any] = {}
FAST = SETTINGS
FAST_CASES = ["tifl/table-1"]


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


def trial_of(experiment: Experiment, options: Options) -> Trial:
    case = {"experiment": experiment.paper, "name": experiment.name, "form": FORM[options.fast]}
    return Trial(case | {"seeds": experiment.seeds}, options.seed)


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    yield from (trial_of(each, options) for each in find() if each.run)


def run(case: Case, seed: int, data: Data) -> dict[str, Any]:
    (experiment,) = (e for e in EXPERIMENTS[case["experiment"]] if e.name == case["name"])
    source = "" if data.source == DIGITS else data.source
    assert experiment.run
    seeds = range(seed, seed + case["seeds"])
    return experiment.run(Options({}, source, [*seeds], case["form"] == "fast")).parts

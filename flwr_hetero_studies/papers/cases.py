"""Every figure and table of the five papers that one machine can run, as a case.

``experiments.toml`` in the folder of a paper lists its experiments: the figure, the function that
makes it, what differs from the paper, and why a claim may fail here.
"""

import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

from flwr_hetero.errors import check_choice
from flwr_hetero_studies.core.experiment import PAPERS, Experiment, Finding
from flwr_hetero_studies.core.plan import DIGITS, Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line

HERE = Path(__file__).parent
ALL = "all"
FULL = "full"
FORMS = (FULL, "fast")
SETTINGS: dict[str, Any] = {}
FAST = SETTINGS
FAST_CASES = ["tifl/table-1"]


def folder_of(paper: str) -> str:
    return paper.replace("-", "_")


def load(paper: str) -> tuple[Experiment, ...]:
    """Read the experiments of a paper, in the order of its figures and tables."""
    folder = folder_of(paper)
    table = tomllib.loads((HERE / folder / "experiments.toml").read_text(encoding="utf-8"))
    phrases: dict[str, str] = {}
    for name, phrase in table["phrases"].items():
        # a phrase may contain the phrases above it
        phrases[name] = phrase.format(**phrases)
    experiments = []
    for name, entry in table["figures"].items():
        fields = {key: value for key, value in entry.items() if key != "run"}
        for key in fields.keys() & {"differs", "cut", "why"}:
            fields[key] = fields[key].format(**phrases)
        if "run" in entry:
            fields["run"] = partial(make, f"{__package__}.{folder}.{entry['run']}")
        experiments.append(Experiment(paper, name, **fields))
    return tuple(experiments)


def make(function: str, options: Options) -> Finding:
    """Run an experiment; its module is imported only now, as it loads torch."""
    return cast(Finding, resolve_name(function)(options))


EXPERIMENTS = {paper: load(paper) for paper in PAPERS}


def find(paper: str = ALL, name: str = ALL) -> list[Experiment]:
    """Return the experiments of a paper, or one of them.

    A paper may be spelt as its folder, with underscores, and a figure with a space or a dash;
    "figure-3" stands for figure-3a and figure-3b.
    """
    paper, name = (text.lower().replace("_", "-").replace(" ", "-") for text in (paper, name))
    check_choice("paper", paper, (*PAPERS, ALL))
    listed = [e for key, group in EXPERIMENTS.items() if paper in (key, ALL) for e in group]
    if name == ALL:
        return listed
    parts = [each for each in listed if each.name == name or each.name.rstrip("abcd") == name]
    if not parts:
        check_choice("figure", name, [experiment.name for experiment in listed])
    return parts


def trial_of(experiment: Experiment, options: Options) -> Trial:
    case = {
        "experiment": experiment.paper,
        "name": experiment.name,
        "form": FORMS[options.fast],
        "seeds": experiment.seeds,
    }
    return Trial(case, options.seed)


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    yield from (trial_of(experiment, options) for experiment in find() if experiment.run)


def run(case: Case, seed: int, data: Data) -> dict[str, Any]:
    (experiment,) = (e for e in EXPERIMENTS[case["experiment"]] if e.name == case["name"])
    assert experiment.run
    source = "" if data.source == DIGITS else data.source
    seeds = [*range(seed, seed + case["seeds"])]
    return experiment.run(Options({}, source, seeds, case["form"] == "fast")).parts

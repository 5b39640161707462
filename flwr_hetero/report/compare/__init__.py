"""Several runs on one page: grouped by their settings, judged, and named by what differs."""

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero.errors import check_choice, check_number, invalid
from flwr_hetero.report.compare import verdict
from flwr_hetero.report.history import CLOCKS, MODEL, History, plain, read_config, read_history
from flwr_hetero.report.style import figure, method_colours, words
from flwr_hetero.report.tables import setting_text

# Settings in which repetitions of a run may differ.
REPEATED = ("seed", "output-dir", "resume", "baseline")
# How long a run is stands in a label only if nothing else tells runs apart.
LENGTH = "num-server-rounds"
# Settings in a label, unless more are needed to tell runs apart.
MAX_LABEL = 3
# Settings of the data and the model: where they differ there is no winner.
SUBJECT = ("dataset", "task", "partition", "alpha", "classes-per-node", "model")


class Recording(NamedTuple):
    """A run directory, as read."""

    path: Path
    history: History
    settings: Mapping[str, Any]

    @property
    def seed(self) -> int | None:
        """The seed, where it is known."""
        seed = self.settings.get("seed")
        return seed if type(seed) is int else None

    @property
    def kind(self) -> str:
        """Settings that make a run of its own kind, as text; without settings the folder."""
        kept = {key: value for key, value in self.settings.items() if key not in REPEATED}
        return json.dumps(kept, sort_keys=True) if self.settings else str(self.path)

    def setting(self, key: str) -> str:
        """Write a setting."""
        return setting_text(self.settings.get(key))

    def label(self, keys: Sequence[str]) -> str:
        """Name the run by some of its settings; by its folder if it has none."""
        named = ", ".join(f"{key}={self.setting(key)}" for key in keys)
        return named if named and self.settings else self.path.name


class Group(NamedTuple):
    """Runs that differ in the seed only."""

    label: str
    colour: str
    runs: Sequence[Recording]
    results: Sequence[verdict.Result]
    verdict: verdict.Verdict
    """Against the baseline; an empty one for itself."""


class Comparison(NamedTuple):
    """Groups of runs, the first being the baseline, and the outcome."""

    groups: Sequence[Group]
    judge: verdict.Judge
    differing: Sequence[str]
    sentences: Sequence[str]
    """A text per group beside the baseline, the fastest first; of one group its end."""


def read_runs(directories: Sequence[str | Path]) -> list[Recording]:
    """Read run directories."""
    paths = [Path(directory).expanduser().resolve() for directory in directories]
    if len(set(paths)) < len(paths):
        raise invalid("DIR", [*map(str, directories)], "differ from each other")
    runs = []
    for path in paths:
        history, settings = read_history(path), read_config(path).get("settings", {})
        if not history.rounds:
            raise invalid("DIR", str(path), "hold at least one round")
        runs.append(Recording(path, history, settings))
    return runs


def compare(
    runs: Sequence[Recording],
    metric: str | None = None,
    target: float | None = None,
    *,
    clock: str | None = None,
) -> Comparison:
    """Compare kinds of runs with the first by what they need to reach a target.

    By default its accuracy or loss, its end less a point, and the first clock that all have.
    """
    kinds = dict.fromkeys(run.kind for run in runs)
    sides = [[run for run in runs if run.kind == kind] for kind in kinds]
    judged, before = _metric(runs, metric), [run.history for run in sides[0]]
    goal, hint = verdict.default_target(before, judged), list[str]()
    if target is not None:
        goal, hint = _target(runs, judged, check_number("target", target, "(-inf, inf)"))
    judge = verdict.Judge(judged, goal, _clock(runs, clock))
    differing, labels = differing_settings([side[0] for side in sides])
    groups: list[Group] = []
    for side, label, colour in zip(sides, labels, method_colours(labels), strict=True):
        results = [verdict.result_of(run.history, judge, run.seed) for run in side]
        names, both = (labels[0], label), (groups[0].results if groups else [], results)
        unlike = _unlike(sides[0][0], side[0])
        found = verdict.say(judge, names, both, unlike) if groups else verdict.Verdict()
        groups.append(Group(label, colour, side, results, found))
    return Comparison(groups, judge, differing, [*_sentences(groups, judge), *hint])


def _sentences(groups: Sequence[Group], judge: verdict.Judge) -> list[str]:
    base, *others = groups
    if not others:
        kind = "one run" if len(runs := base.runs) == 1 else f"{len(runs)} runs of equal settings"
        end = f"{words(judge.metric)} {figure(judge.metric, verdict.mean(base.results, 'end'))}"
        return [f"Nothing to compare: {kind}, {end} at the end."]
    others.sort(key=lambda g: -g.verdict.speed.factor if g.verdict.speed else 0.0)
    return [group.verdict.text for group in others]


def _target(runs: Sequence[Recording], metric: str, target: float) -> tuple[float, list[str]]:
    """Return the target, and what to say if it is read as per cent of a metric from 0 to 1."""
    values = np.concatenate([verdict.trained_values(run.history, metric)[1] for run in runs])
    low, high = values.min(), values.max()
    if 0 <= target <= 1 or not 0 <= low <= high <= 1:
        return target, []
    if not 0 <= target <= 100 or verdict.lower_is_better(metric):
        hint = f"its values run from {low:.3g} to {high:.3g}"
        raise invalid("target", target, f"be a value of {metric}", hint)
    return target / 100, [f"The target {target:g} is read as {target:g} %: {metric} is at most 1."]


def _unlike(base: Recording, other: Recording) -> str:
    """Say in what runs differ that have other data or another model, as far as they record it."""
    known = [key for key in SUBJECT if {key} <= base.settings.keys() & other.settings.keys()]
    differ = [key for key in known if base.setting(key) != other.setting(key)]
    shapes, others = _shapes(base.path), _shapes(other.path)
    differ += ["names or shapes of its arrays"] if shapes and others and shapes != others else []
    return f"the data or the model is another one ({', '.join(differ)})" if differ else ""


def _shapes(folder: Path) -> dict[str, Any]:
    """Read the shapes of the saved model's arrays by name; none without a whole file."""
    try:
        with (folder / MODEL).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, 10**8)))
            return {name: entry.get("shape") for name, entry in header.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _metric(runs: Sequence[Recording], wanted: str | None) -> str:
    """Choose the first run's accuracy or loss; refuse a metric that a run lacks."""
    metric = wanted or runs[0].history.main_metric()
    if metric is None:
        raise invalid("metric", metric, "be in the history, which has none")
    for run in runs:
        read, name = run.history, run.path.name
        known = [key for key in read.names if len(verdict.trained_values(read, key)[0])]
        if metric not in known:
            rule = f"be in every run; {name} has {', '.join(known) or 'none'} after round 0"
            raise invalid("metric", metric, rule)
    return metric


def _clock(runs: Sequence[Recording], wanted: str | None) -> str:
    """Choose the first clock that all runs have."""
    is_mixed = len({run.history.unit for run in runs}) > 1
    # A round and a server update are not the same work.
    clocks = [clock for clock in CLOCKS if not (is_mixed and clock == "round")]
    known = [c for c in clocks if all(np.nansum(run.history.column(c)) > 0 for run in runs)]
    rule = "rounds and server updates are not compared" if is_mixed else ""
    return str(check_choice("clock", wanted or [*known, "round"][0], known or ["round"], rule))


def differing_settings(runs: Sequence[Recording]) -> tuple[list[str], list[str]]:
    """Return the settings in which runs differ, and a label of these for each run."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in REPEATED)
    differ = [key for key in keys if len({run.setting(key) for run in runs}) > 1]

    def tells_apart(some: Sequence[str]) -> bool:
        return len({run.label(some) for run in runs}) == len(runs)

    # The fewest settings that do; if none, folders.
    last = sorted(differ, key=lambda key: key == LENGTH)
    some = (few for count in range(1, MAX_LABEL + 1) for few in combinations(last, count))
    shown = next(filter(tells_apart, some), last)
    labels = [run.label(shown) for run in runs]
    if len(set(labels)) < len(labels):
        labels = [f"{label} ({run.path})" for label, run in zip(labels, runs, strict=True)]
    return differ, labels


def figures(comparison: Comparison) -> dict[str, Any]:
    """Return what the page says as numbers, for ``--json``."""
    groups = [
        {
            "label": group.label,
            "speed_up": group.verdict.speed and group.verdict.speed._asdict(),
            "winner": group.verdict.winner,
            "runs": [
                {"directory": str(run.path), **result._asdict()}
                for run, result in zip(group.runs, group.results, strict=True)
            ],
        }
        for group in comparison.groups
    ]
    found = {"verdict": comparison.sentences, **comparison.judge._asdict()}
    return dict(plain({**found, "differing_settings": comparison.differing, "groups": groups}))

"""Several runs on one page: grouped by their settings, judged, and labelled by what differs."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero.errors import check_choice, check_number, invalid
from flwr_hetero.report.compare import verdict
from flwr_hetero.report.compare.sentences import HOW_TO_EVALUATE, Verdict, say
from flwr_hetero.report.compare.verdict import Judge, Result, result_of, trained_values
from flwr_hetero.report.history import CLOCKS, MODEL, History, plain, read_config, read_history
from flwr_hetero.report.style import figure, words
from flwr_hetero.report.tables import setting_text

# Settings in which repetitions of a run may differ.
REPEATED = ("seed", "output-dir", "resume", "baseline")
# The length of a run is in a label only if no other setting tells runs apart.
LENGTH = "num-server-rounds"
# A label has no more settings, unless more are needed to tell runs apart.
MAX_LABEL = 3
# Settings of the data and the model: no winner is named if runs differ in one of them.
SUBJECT = ("dataset", "task", "partition", "alpha", "classes-per-node", "model")
# The header of a safetensors file is not longer than this.
MAX_HEADER = 10**8


class Recording(NamedTuple):
    """A run directory, as read."""

    path: Path
    history: History
    settings: Mapping[str, Any]

    @property
    def seed(self) -> int | None:
        """The seed, if it is known."""
        seed = self.settings.get("seed")
        return seed if type(seed) is int else None

    @property
    def kind(self) -> str:
        """Text that is the same for runs that differ only in the seed."""
        kept = {key: value for key, value in self.settings.items() if key not in REPEATED}
        return json.dumps(kept, sort_keys=True) if self.settings else str(self.path)

    def setting(self, key: str) -> str:
        """Write a setting."""
        return setting_text(self.settings.get(key))

    def label(self, keys: Sequence[str]) -> str:
        """Name the run by some of its settings, or by its folder if it has none."""
        parts = []
        for key in keys:
            value = self.settings.get(key)
            # A name such as FedAvg says enough. A number or a path needs its key.
            is_name = isinstance(value, str) and value[:1].isalpha()
            parts.append(self.setting(key) if is_name else f"{key}={self.setting(key)}")
        return ", ".join(parts) if parts and self.settings else self.path.name


class Group(NamedTuple):
    """Runs that differ in the seed only."""

    label: str
    runs: Sequence[Recording]
    results: Sequence[Result]
    verdict: Verdict
    """Against the baseline; an empty one for the baseline itself."""


class Comparison(NamedTuple):
    """Groups of runs, the first being the baseline, and the outcome."""

    groups: Sequence[Group]
    judge: Judge
    differing: Sequence[str]
    sentences: Sequence[str]
    """A text for each group except the baseline, the fastest first, or one on the baseline.

    The first line of a text is the outcome. The next lines are the details, such as the price.
    """


def read_runs(
    directories: Sequence[str | Path], track: Callable[[list[Path]], Iterable[Path]] = iter
) -> list[Recording]:
    """Read run directories; ``track`` may show how many of their paths are done."""
    paths = [Path(directory).expanduser().resolve() for directory in directories]
    if len(set(paths)) < len(paths):
        raise invalid("DIR", [*map(str, directories)], "differ from each other")
    runs = []
    for path in track(paths):
        history = read_history(path)
        if not history.rounds:
            raise invalid("DIR", str(path), "hold at least one round")
        runs.append(Recording(path, history, read_config(path).get("settings", {})))
    return runs


def compare(
    runs: Sequence[Recording],
    metric: str | None = None,
    target: float | None = None,
    *,
    clock: str | None = None,
) -> Comparison:
    """Compare kinds of runs with the first kind by what they need to reach a target.

    ValueError for a metric or a clock that a run lacks, or a target that is no value of the metric.

    Parameters
    ----------
    runs : sequence of Recording
        The runs; the kind of the first one is the baseline.
    metric : str, optional
        By default the first run's accuracy, or its loss.
    target : float, optional
        By default the baseline's final accuracy minus one percentage point.
    clock : str, optional
        By default the first of "virtual_s", "wall_s" and "round" that all runs have.
    """
    kinds = dict.fromkeys(run.kind for run in runs)
    sides = [[run for run in runs if run.kind == kind] for kind in kinds]
    metric = _metric(runs, metric)
    hints: list[str] = []
    if target is None:
        target = verdict.default_target([run.history for run in sides[0]], metric)
    else:
        target, hints = _target(runs, metric, check_number("target", target, "(-inf, inf)"))
    judge = Judge(metric, target, _clock(runs, clock))
    differing, labels = differing_settings([side[0] for side in sides])
    base = sides[0][0].history
    results = [[result_of(run.history, judge, run.seed, base) for run in side] for side in sides]
    groups: list[Group] = []
    for place in range(len(sides)):
        outcome = Verdict()
        if place > 0:
            unlike = _unlike(sides[0][0], sides[place][0])
            names = (labels[0], labels[place])
            outcome = say(judge, names, (results[0], results[place]), unlike)
        groups.append(Group(labels[place], sides[place], results[place], outcome))
    return Comparison(groups, judge, differing, [*_sentences(groups, judge), *hints])


def _sentences(groups: Sequence[Group], judge: Judge) -> list[str]:
    base, *others = groups
    if not others:
        count = len(base.runs)
        kind = "one run" if count == 1 else f"{count} runs with the same settings"
        final = figure(judge.metric, verdict.mean(base.results, "end"))
        return [f"Nothing to compare: {kind}, final {words(judge.metric)} {final}."]
    others.sort(key=lambda g: -g.verdict.speed.factor if g.verdict.speed else 0.0)
    texts = [group.verdict.text for group in others]
    if not all(result.node_metric for group in groups for result in group.results):
        texts[-1] += f"\n{HOW_TO_EVALUATE}"
    return texts


def _target(runs: Sequence[Recording], metric: str, target: float) -> tuple[float, list[str]]:
    """Return the target, and a hint if it is read as percent of a metric from 0 to 1."""
    values = np.concatenate([trained_values(run.history, metric)[1] for run in runs])
    low = values.min()
    high = values.max()
    if 0 <= target <= 1 or not 0 <= low <= high <= 1:
        return target, []
    if not 0 <= target <= 100 or verdict.lower_is_better(metric):
        hint = f"its values run from {low:.3g} to {high:.3g}"
        raise invalid("target", target, f"be a value of {metric}", hint)
    return target / 100, [f"The target {target:g} is read as {target:g} %: {metric} is at most 1."]


def _unlike(base: Recording, other: Recording) -> str:
    """Say in what runs differ that have other data or another model, if they record it."""
    differ = [
        key
        for key in SUBJECT
        if key in base.settings and key in other.settings
        if base.setting(key) != other.setting(key)
    ]
    base_shapes = _shapes(base.path)
    other_shapes = _shapes(other.path)
    if base_shapes and other_shapes and base_shapes != other_shapes:
        differ.append("names or shapes of its arrays")
    return f"the data or the model is not the same ({', '.join(differ)})" if differ else ""


def _shapes(folder: Path) -> dict[str, Any]:
    """Read the shapes of the saved model's arrays by name; none without a complete file."""
    try:
        with (folder / MODEL).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, MAX_HEADER)))
            return {name: entry.get("shape") for name, entry in header.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _metric(runs: Sequence[Recording], wanted: str | None) -> str:
    """Choose the first run's accuracy or loss by default; refuse a metric that a run lacks."""
    metric = wanted or runs[0].history.main_metric()
    if metric is None:
        raise invalid("metric", metric, "be in the history, which has none")
    for run in runs:
        names = [name for name in run.history.names if len(trained_values(run.history, name)[0])]
        if metric not in names:
            has = f"{run.path.name} has {', '.join(names) or 'none'} after round 0"
            raise invalid("metric", metric, f"be in every run; {has}")
    return metric


def _clock(runs: Sequence[Recording], wanted: str | None) -> str:
    """Choose the first clock that all runs have by default; refuse a clock that a run lacks."""
    # A round and a server update are not the same work.
    is_mixed = len({run.history.unit for run in runs}) > 1
    clocks = [
        clock
        for clock in CLOCKS
        if not (is_mixed and clock == "round")
        if all(np.nansum(run.history.column(clock)) > 0 for run in runs)
    ]
    default = clocks[0] if clocks else "round"
    hint = "rounds and server updates are not compared" if is_mixed else ""
    return str(check_choice("clock", wanted or default, clocks or ["round"], hint))


def differing_settings(runs: Sequence[Recording]) -> tuple[list[str], list[str]]:
    """Return the settings in which runs differ, and a label of these for each run."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in REPEATED)
    differ = [key for key in keys if len({run.setting(key) for run in runs}) > 1]

    def tells_apart(some: Sequence[str]) -> bool:
        return len({run.label(some) for run in runs}) == len(runs)

    # Label by as few settings as possible, and by all of them if no few suffice.
    candidates = sorted(differ, key=lambda key: key == LENGTH)
    few = (some for count in range(1, MAX_LABEL + 1) for some in combinations(candidates, count))
    shown = next(filter(tells_apart, few), candidates)
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
    outcome = {"verdict": comparison.sentences, **comparison.judge._asdict()}
    return dict(plain({**outcome, "differing_settings": comparison.differing, "groups": groups}))

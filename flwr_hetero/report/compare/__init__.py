"""Several runs on one page: put together by their settings, judged, and named by what differs."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero.errors import check_choice, check_number, invalid
from flwr_hetero.report.compare.verdict import (
    Judge,
    Result,
    Speed,
    default_target,
    lower_is_better,
    mean,
    result_of,
    speed_up,
    verdict,
)
from flwr_hetero.report.history import CLOCKS, History, read_config, read_history
from flwr_hetero.report.style import METHOD_COLOURS, figure, method_colours, words
from flwr_hetero.report.tables import setting_text

# Settings in which repetitions of a run may differ.
REPEATED = ("seed", "output-dir", "resume", "baseline")
# How long a run is stands in a label only if nothing else tells runs apart.
LENGTH = "num-server-rounds"
# Settings in a label, unless more are needed to tell runs apart.
MAX_LABEL = 3
# Sections of the history that name a run's method, the first of these that it has.
SECTIONS = ("fedbuff", "tifl", "biased_local_sgd", "cd_grab")


class Run(NamedTuple):
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

    @property
    def method(self) -> str:
        """The method by whose colour the run is drawn."""
        if "vanilla" in (self.settings.get("policy"), self.settings.get("selection")):
            return "fedavg"
        rounds = self.history.rounds
        found = [name.replace("_", "-") for name in SECTIONS if any(name in r for r in rounds)]
        sampler = str(self.settings.get("sampler"))
        return [*found, sampler if sampler in METHOD_COLOURS else "fedavg"][0]

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
    runs: Sequence[Run]
    results: Sequence[Result]
    speed: Speed | None
    """Against the baseline; None for itself and where one of both never got there."""


class Comparison(NamedTuple):
    """Groups of runs, the first being the baseline, and the outcome."""

    groups: Sequence[Group]
    judge: Judge
    differing: Sequence[str]
    sentences: Sequence[str]
    """A sentence per group beside the baseline, the fastest first; of one group its end."""


def read_runs(directories: Sequence[str | Path]) -> list[Run]:
    """Read run directories."""
    paths = [Path(directory).expanduser().resolve() for directory in directories]
    if len(set(paths)) < len(paths):
        raise invalid("DIR", [*map(str, directories)], "differ from each other")
    runs = []
    for path in paths:
        history, settings = read_history(path), read_config(path).get("settings", {})
        if not history.rounds:
            raise invalid("DIR", str(path), "hold at least one round")
        runs.append(Run(path, history, {key.replace("_", "-"): v for key, v in settings.items()}))
    return runs


def compare(
    runs: Sequence[Run],
    metric: str | None = None,
    target: float | None = None,
    *,
    baseline: str | None = None,
    clock: str | None = None,
    falls: bool | None = None,
) -> Comparison:
    """Compare runs, or kinds of runs, by what they need to reach a target.

    What is left out is the first run, its accuracy or loss, its end less a point, the first clock
    that all have, and whether lower is better by the metric's name.
    """
    kinds = dict.fromkeys(run.kind for run in (_baseline(runs, baseline), *runs))
    sides = [[run for run in runs if run.kind == kind] for kind in kinds]
    judged, before = _metric([*sides[0], *runs], metric), [run.history for run in sides[0]]
    down = lower_is_better(judged) if falls is None else falls
    goal = default_target(before, judged, falls=down) if target is None else target
    goal = check_number("target", goal, "(-inf, inf)")
    judge = Judge(judged, goal, _clock(runs, clock), down)
    differing, labels = differing_settings([side[0] for side in sides])
    colours = method_colours([side[0].method for side in sides])
    groups: list[Group] = []
    for side, label, colour in zip(sides, labels, colours, strict=True):
        results = [result_of(run.history, judge, run.seed) for run in side]
        speed = speed_up(groups[0].results, results) if groups else None
        groups.append(Group(label, colour, side, results, speed))
    base, *others = groups
    others.sort(key=lambda group: -group.speed.factor if group.speed else 0.0)
    sentences = [
        verdict(judge, (base.label, group.label), (base.results, group.results)) for group in others
    ]
    if not others:
        kind = "one run" if len(runs) == 1 else f"{len(runs)} runs of equal settings"
        end = f"{words(judge.metric)} {figure(judge.metric, mean(base.results, 'end'))}"
        sentences = [f"Nothing to compare: {kind}, {end} at the end."]
    return Comparison(groups, judge, differing, sentences)


def _metric(runs: Sequence[Run], wanted: str | None) -> str:
    """Choose the first run's accuracy or loss; refuse a metric that a run lacks."""
    metric = wanted or runs[0].history.main_metric()
    if metric is None:
        raise invalid("metric", metric, "be in the history, which has none")
    for run in runs:
        try:
            run.history.metric(metric)
        except ValueError:
            known = ", ".join(run.history.metrics()) or "none at all"
            rule = f"be in every run; {run.path.name} has {known}"
            raise invalid("metric", metric, rule) from None
    return metric


def _baseline(runs: Sequence[Run], wanted: str | None) -> Run:
    named = [run for run in runs if wanted in (None, str(run.path), run.path.name)]
    if not named:
        check_choice("baseline", wanted, dict.fromkeys(run.path.name for run in runs))
    return named[0]


def _clock(runs: Sequence[Run], wanted: str | None) -> str:
    """Choose the first clock that all runs have."""
    asked = list(CLOCKS) if wanted is None else [check_choice("clock", wanted, CLOCKS)]
    is_mixed = len({run.history.unit for run in runs}) > 1
    found = [c for c in asked if all(np.nansum(run.history.column(c)) > 0 for run in runs)]
    if is_mixed and found in ([], ["round"]) and "round" in asked:
        rule = "be virtual or wall where one run counts rounds and another server updates"
        raise invalid("clock", wanted, rule)
    if wanted and not found:
        raise invalid("clock", wanted, "be in every run")
    return [*found, "round"][0]


def differing_settings(runs: Sequence[Run]) -> tuple[tuple[str, ...], list[str]]:
    """Return the settings in which runs differ, and a label of these for each run."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in REPEATED)
    differ = tuple(key for key in keys if len({run.setting(key) for run in runs}) > 1)

    def tells_apart(some: Sequence[str]) -> bool:
        return len({run.label(some) for run in runs}) == len(runs)

    shown = tuple(key for key in differ if key != LENGTH)
    shown = shown if shown and tells_apart(shown) else differ
    if len(shown) > MAX_LABEL:
        few = (some for size in range(1, MAX_LABEL + 1) for some in combinations(shown, size))
        shown = next(filter(tells_apart, few), shown)
    labels = [run.label(shown) for run in runs]
    if len(set(labels)) < len(labels):  # folders of one name, without settings
        labels = [f"{label} ({run.path})" for label, run in zip(labels, runs, strict=True)]
    return differ, labels


# -- for --json and --csv --


def figures(comparison: Comparison) -> dict[str, Any]:
    """Return what the page says as numbers."""

    def plain(result: Result) -> dict[str, Any]:
        is_number = [not isinstance(x, float) or np.isfinite(x) for x in result]
        return {k: x if is_number[i] else None for i, (k, x) in enumerate(result._asdict().items())}

    groups = [
        {
            "label": group.label,
            "speed_up": group.speed and group.speed._asdict(),
            "runs": [
                {"directory": str(run.path), **plain(result)}
                for run, result in zip(group.runs, group.results, strict=True)
            ],
        }
        for group in comparison.groups
    ]
    start = {"verdict": list(comparison.sentences), **comparison.judge._asdict()}
    return start | {"differing_settings": list(comparison.differing), "groups": groups}


def csv_text(comparison: Comparison) -> str:
    """Write a line per run."""
    groups = figures(comparison)["groups"]
    rows = [{"label": group["label"], **run} for group in groups for run in group["runs"]]
    file = io.StringIO()
    writer = csv.DictWriter(file, [*rows[0]], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()

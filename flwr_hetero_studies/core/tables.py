"""Lines of results: reading, grouping, means with spread, times to a target, tables, plots."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import mean, stdev
from string import Formatter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.report.style import METHOD_COLOURS, method_colours

RESULTS = "results.jsonl"
Case = dict[str, Any]
Line = dict[str, Any]
Vector = NDArray[np.float64]
Curves = Mapping[str, tuple[ArrayLike, ArrayLike]]


def read(folder: Path) -> list[Line]:
    """Read a folder's results; none if there are none."""
    path = folder / RESULTS
    return [json.loads(x) for x in path.read_text("utf-8").splitlines()] if path.exists() else []


def of(lines: Iterable[Line], **wanted: Any) -> list[Line]:
    """Take the lines whose case has these values."""
    items = wanted.items()
    return [line for line in lines if all(line["case"].get(key) == v for key, v in items)]


def by(lines: Iterable[Line], *keys: str) -> dict[Any, list[Line]]:
    """Group lines by values of their cases, in order of appearance."""
    groups: dict[Any, list[Line]] = {}
    for line in lines:
        values = tuple(line["case"].get(key) for key in keys)
        groups.setdefault(values if len(keys) > 1 else values[0], []).append(line)
    return groups


def metric(lines: Iterable[Line], name: str) -> list[float]:
    """Return a figure of each line."""
    return [line["metrics"][name] for line in lines]


def by_seed(lines: Iterable[Line]) -> dict[int, Line]:
    return {line["seed"]: line for line in lines}


def pairs(lines: Iterable[Line], base: Iterable[Line]) -> list[tuple[Line, Line]]:
    """Pair lines with the base of the same seed."""
    known = by_seed(base)
    return [(line, known[line["seed"]]) for line in lines if line["seed"] in known]


def seeds(lines: Iterable[Line]) -> list[int]:
    return sorted({line["seed"] for line in lines})


def software(lines: Iterable[Line], *names: str) -> str:
    """Name the versions that the lines were made with."""
    found = [{k: v for k, v in x["versions"].items() if k in names or not names} for x in lines]
    texts = dict.fromkeys(", ".join(f"{k} {v}" for k, v in each.items()) for each in found)
    return "; ".join(text for text in texts if text)


# --- figures -------------------------------------------------------------------------------


def spread(values: Sequence[float], form: str = ".3g", deviation: str = ".2g") -> str:
    """Write a mean ± standard deviation; values that are not finite never came about."""
    known = [value for value in values if isfinite(value)]
    if not known:
        return "never"
    text = f"{mean(known):{form}}" + (f" ± {stdev(known):{deviation}}" if len(known) > 1 else "")
    missed = len(values) - len(known)
    return text + (f" ({missed} of {len(values)} never)" if missed else "")


def extent(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Write a mean with its extremes in brackets."""
    text = form.format(mean(values))
    if len(values) == 1:
        return text
    return f"{text} ({form.format(min(values))} to {form.format(max(values))})"


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a Markdown table."""
    every = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in every)


def rows(lines: Iterable[Line], forms: Mapping[str, str], *keys: str) -> list[list[str]]:
    """Write a row per line: its name (or other keys of its case), then figures in their forms.

    A form is filled by the figure as ``{}``, or by all metrics by their names.
    """
    return [
        [str(line["case"][key]) for key in keys or ("name",)]
        + [form.format(m.get(name), **m) for name, form in forms.items()]
        for line in lines
        for m in [line["metrics"]]
    ]


def fill(page: str, parts: Mapping[str, object]) -> str:
    """Fill a page's ``{parts}``; a section that names one which is not there is left out."""

    def known(section: str) -> bool:
        fields = [field for _, field, *_ in Formatter().parse(section) if field]
        return all(re.split(r"[.[]", field)[0] in parts for field in fields)

    sections = re.split(r"(?m)^(?=## )", page)
    return "".join(section.format(**parts) for section in sections if known(section))


# --- curves --------------------------------------------------------------------------------


def smooth(values: ArrayLike, window: int, *, centred: bool = False) -> Vector:
    """Average each value with those just before it, or with its neighbours on both sides."""
    array = np.asarray(values, float)
    if centred:
        padded = np.pad(array, window // 2, "edge")
        return np.asarray(np.convolve(padded, np.ones(window) / window, "valid"))
    sums = np.cumsum(np.insert(array, 0, 0.0))
    ends = np.arange(1, len(array) + 1)
    starts = np.maximum(ends - window, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def reached(values: ArrayLike, target: float, *, between: bool = False) -> float:
    """Return the place of the first value at the target, between two if wanted; NaN if never."""
    array = np.asarray(values, float)
    hits = np.flatnonzero(array >= target)
    if not len(hits):
        return float("nan")
    at = int(hits[0])
    if at == 0 or not between or not isfinite(array[at - 1]):
        return float(at)
    return at - 1 + float((target - array[at - 1]) / (array[at] - array[at - 1]))


def at(column: ArrayLike, place: float) -> float:
    """Return a column's value at a place, between two rows by a straight line."""
    array = np.asarray(column, float)
    return float(np.interp(place, np.arange(len(array)), array))


def last(line: Line, name: str, count: int) -> float:
    """Return the mean of the last points of a curve."""
    return float(np.mean(line["curve"][name][-count:]))


# --- plots ---------------------------------------------------------------------------------

DASHES = ("-", "--", ":", "-.")


def looks(names: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give each name a colour, its method's if that is free, then a dash."""
    every = list(names)
    words = [name.lower().replace(" ", "-") for name in every]
    methods = [next((m for m in METHOD_COLOURS if word.startswith(m)), word) for word in words]
    used: Counter[str] = Counter()
    for name, colour in zip(every, method_colours(methods), strict=True):
        yield name, {"color": colour, "linestyle": DASHES[used[colour] % len(DASHES)]}
        used[colour] += 1


def draw(
    panels: Mapping[str, Curves],
    path: Path,
    xlabel: str | Sequence[str],
    ylabel: str | Sequence[str],
    *,
    columns: int = 3,
    size: tuple[float, float] = (4.2, 3.0),
    **axes_settings: Any,
) -> None:
    """Draw a panel per entry and a line per name, with one legend, and write a PNG.

    ``axes_settings`` are those of matplotlib's axes; a function gets the panel's title.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = dict.fromkeys(name for curves in panels.values() for name in curves)
    look = dict(looks(names))
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with rc_context(style | {"axes.grid": True, "grid.alpha": 0.25, "axes.titlesize": 9}):
        height = size[1] * rows + 0.6
        figure = Figure(figsize=(size[0] * columns, height), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flat
        for number, (title, curves) in enumerate(panels.items()):
            axes = grid[number]
            for name, (x, y) in curves.items():
                axes.plot(x, y, **look[name], lw=1.5)
            axes.set(title=title, xlabel=_each(xlabel, number), ylabel=_each(ylabel, number))
            axes.set(**{k: v(title) if callable(v) else v for k, v in axes_settings.items()})
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        if len(names) > 1:
            handles = [grid[0].plot([], [], label=name, **look[name])[0] for name in names]
            figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, dpi=80)


def _each(labels: str | Sequence[str], number: int) -> str:
    return labels if isinstance(labels, str) else labels[number % len(labels)]

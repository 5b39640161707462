"""Figures of pages: a panel for each task, a line for each method."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from flwr_hetero.report.style import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, RUN_COLOURS, SKY

Curves = Mapping[str, Sequence[ArrayLike]]
"""By name: x and y, and the lower and upper edges of a band if there is one."""
DASHES = ("-", "--", ":", "-.")
METHOD_COLOURS = {
    "fedavg": GREY,
    "fedbuff": SKY,
    "tifl": BLUE,
    "biased-local-sgd": RED,
    "cd-grab": GREEN,
    "mercury": PURPLE,
    "pgd": ORANGE,
}
"""A method has the same colour in every figure."""


def looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Give each name the colour of its method, or a free one, and dashes if that is in use."""
    every = list(names)
    words = [name.lower().replace(" ", "-") for name in every]
    own = [next((c for m, c in METHOD_COLOURS.items() if word.startswith(m)), "") for word in words]
    free = cycle([colour for colour in RUN_COLOURS if colour not in own] or RUN_COLOURS)
    used: Counter[str] = Counter()
    found = {}
    for name, reserved in zip(every, own, strict=True):
        colour = next(free) if not reserved or used[reserved] else reserved
        found[name] = {"color": colour, "linestyle": DASHES[used[colour] % len(DASHES)]}
        used[colour] += 1
    return found


def draw(
    panels: Mapping[str, Curves],
    path: Path,
    xlabel: str | Sequence[str],
    ylabel: str | Sequence[str],
    *,
    columns: int = 3,
    size: tuple[float, float] = (4.2, 3.0),
    levels: Mapping[str, float] | None = None,
    **axes_settings: Any,
) -> None:
    """Draw a panel per entry, a line per name and a dotted one per level, and write a PNG.

    ``axes_settings`` are those of matplotlib's axes, where a function gets the panel's title.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = dict.fromkeys(name for curves in panels.values() for name in curves)
    look = looks(names)
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with rc_context(style | {"axes.grid": True, "grid.alpha": 0.25, "axes.titlesize": 9}):
        height = size[1] * rows + 0.6
        figure = Figure(figsize=(size[0] * columns, height), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flat
        for number, (title, curves) in enumerate(panels.items()):
            axes = grid[number]
            for name, (x, y, *edges) in curves.items():
                axes.plot(x, y, **look[name], lw=1.5)
                if edges:
                    axes.fill_between(x, *edges, color=look[name]["color"], alpha=0.12, lw=0)
            if levels:
                axes.axhline(levels[title], color="black", lw=0.8, ls=":")
            axes.set(title=title, xlabel=_each(xlabel, number), ylabel=_each(ylabel, number))
            axes.set(**{k: v(title) if callable(v) else v for k, v in axes_settings.items()})
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        # All panels show the same methods, so they have one legend.
        if len(names) > 1:
            handles = [grid[0].plot([], [], label=name, **look[name])[0] for name in names]
            figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, dpi=80)


def _each(labels: str | Sequence[str], number: int) -> str:
    return labels if isinstance(labels, str) else labels[number % len(labels)]

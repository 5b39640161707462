"""Accuracy against virtual time, a panel per case."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from curves import TOLERANCE, Line, final_accuracy, lengths, mean_curve
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from flwr_hetero.report.style import LIGHT, run_look

HERE = Path(__file__).parent
COLUMNS = 3


def draw_curves(panels: Mapping[str, Sequence[Line]], key: str, file: str) -> None:
    """Draw a panel per entry and a curve per value of ``key``, and write a PNG."""
    mpl.use("Agg")
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    looks = {name: run_look(i) for i, name in enumerate(_names(panels, key))}
    with LIGHT.applied():
        size = (4.2 * columns if columns > 1 else 8, 3.1 * rows + 0.6 if rows > 1 else 4)
        figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (title, lines) in zip(grid.flat, panels.items(), strict=False):
            _draw_panel(axes, lines, key, looks)
            axes.set_title(title)
        handles = [plt.Line2D([], [], label=name, **look) for name, look in looks.items()]
        figure.legend(handles=handles, loc="lower center", ncols=min(len(handles), 4))
        figure.tight_layout(rect=(0, 0.3 * -(-len(handles) // 4) / size[1], 1, 1))
        figure.savefig(HERE / file)
        plt.close(figure)


def _names(panels: Mapping[str, Sequence[Line]], key: str) -> list[str]:
    return list(dict.fromkeys(str(line[key]) for lines in panels.values() for line in lines))


def _draw_panel(axes: Axes, lines: Sequence[Line], key: str, looks: Mapping[str, dict]) -> None:
    vanilla = [line for line in lines if line[key] == "vanilla"]
    unit_s, final = lengths(vanilla), final_accuracy(vanilla)
    axes.axhline(final - TOLERANCE, color=LIGHT.muted, linewidth=0.8)
    for name, look in looks.items():
        mine = [line for line in lines if line[key] == name]
        if mine:
            axes.plot(*mean_curve(mine, unit_s), **look)
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=max(0.0, final - 0.4))
    axes.set_xlabel("virtual time / vanilla's whole run")
    axes.set_ylabel("test accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))

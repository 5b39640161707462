"""Training curves and distributions of priorities as PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from curves import Line, by
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter, StrMethodFormatter
from PIL import Image

from flwr_hetero.report.style import LIGHT, run_look

Curve = dict[str, list[float]]


def draw_races(races: Mapping[str, Mapping[str, Curve]], path: Path) -> None:
    """Draw the training loss against steps and against time, a row per race."""
    mpl.use("Agg")
    names = list(dict.fromkeys(name for curves in races.values() for name in curves))
    with LIGHT.applied():
        figure, grid = plt.subplots(len(races), 2, figsize=(9, 2.6 * len(races)), squeeze=False)
        for panels, (title, curves) in zip(grid, races.items(), strict=True):
            for axes, clock in zip(panels, ("iteration", "time"), strict=True):
                for name, curve in curves.items():
                    look = run_look(names.index(name))
                    axes.plot(curve[clock], curve["loss"], label=name, **look)
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axes.yaxis.set_minor_formatter(NullFormatter())
            panels[0].set_ylabel("training loss")
            panels[0].set_title(title)
        for axes, label in zip(grid[-1], ("steps", "time, in steps of SGD"), strict=True):
            axes.set_xlabel(label)
        most = max((row[0] for row in grid), key=lambda axes: len(axes.lines))
        handles, labels = most.get_legend_handles_labels()
        figure.tight_layout(rect=(0, 0.05, 1, 1))
        figure.legend(handles, labels, loc="lower center", ncols=3)
        save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a small PNG: few colours, few pixels."""
    figure.savefig(path, dpi=80)
    plt.close(figure)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(64)
    small.save(path, optimize=True)


def draw_shares(lines: Sequence[Line], path: Path) -> None:
    """Draw quantiles of the priorities and the share of the top over iterations."""
    mpl.use("Agg")
    tasks = by(lines, "task")
    with LIGHT.applied():
        figure, grid = plt.subplots(len(tasks), 2, figsize=(10, 3.4 * len(tasks)), squeeze=False)
        for (left, right), (task, group) in zip(grid, tasks.items(), strict=True):
            for number, line in enumerate(group):
                look = run_look(number) | {"label": f"iteration {line['iteration']}"}
                left.plot(line["quantiles"], line["levels"], **look)
                tops = {float(k): v["of_decrease"] for k, v in line["tops"].items()}
                right.plot(list(tops), list(tops.values()), marker="o", markersize=3, **look)
            left.set_title(f"{task}: distribution of priorities")
            left.set_xlabel("priority / mean of |priority|")
            left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            right.set_title("loss decrease by the top k alone")
            right.set_xlabel("k")
            right.set_ylabel("of that by all")
            for axis in (right.xaxis, right.yaxis):
                axis.set_major_formatter(
                    PercentFormatter(1.0, decimals=1 if axis is right.xaxis else 0)
                )
            right.legend()
        figure.tight_layout()
        save(figure, path)

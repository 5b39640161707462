"""Selection, TiFL over FedAvg, weighted mean, growth with the fleet, memory of a node."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flwr_hetero_studies.core import plots, record, tables
from flwr_hetero_studies.core.record import Line, metric

SELECTION = {"mean_ms": "{:.2f}", "median_ms": "{:.2f}", "most_ms": "{:.1f}"}
MEAN = {
    "Flower": "{flower_s:.3f} s",
    "ours": "{ours_s:.3f} s",
    "speed-up (least to most)": "{speedup:.1f}x ({speedup_least:.1f} to {speedup_most:.1f})",
    "extra memory": "{ours_mb:.1f} of {flower_mb:.1f} MB ({share:.0%})",
    "difference": "{largest_difference:.1e}",
    "integers": "{flower_integers} -> {our_integers}",
}
MEMORY = {"resident": "{:,.0f}", "private": "{:,.0f}", "peak": "{:,.0f}"}


def selection(lines: list[Line]) -> str:
    rows = tables.rows(lines, SELECTION, "nodes")
    rows = [[f"{int(nodes):,}", *cells] for nodes, *cells in rows]
    return tables.table(["known nodes", "mean", "median", "most"], rows)


def overhead(lines: list[Line]) -> str:
    (line,) = lines
    case, m = line["case"], line["metrics"]
    text = (
        f"CPU time over FedAvg alone, {case['nodes']} nodes x {case['megabytes']:g} MB, "
        f"{case['repeats']} rounds turn by turn:\n"
    )
    for i, part in enumerate(("time in the strategy", "whole round on LocalGrid")):
        text += (
            f"{part} {m['fedavg_s'][i]:.2f} s to {m['tifl_s'][i]:.2f} s, overhead "
            f"{m['overhead'][i]:+.1%} ({m['overhead_least'][i]:+.1%} to "
            f"{m['overhead_most'][i]:+.1%}).\n"
        )
    return text


def means(lines: list[Line]) -> str:
    for m in (line["metrics"] for line in lines):
        ours, theirs = m["ours_extra_bytes"], m["flower_extra_bytes"]
        m |= {"ours_mb": ours / 1e6, "flower_mb": theirs / 1e6, "share": ours / theirs}
    return tables.table(["layout", *MEAN], tables.rows(lines, MEAN))


def growth(lines: Sequence[Line], name: str) -> float:
    """Return the exponent of a figure in the number of nodes."""
    # a straight line through the logarithms
    nodes = np.log([line["case"]["nodes"] for line in lines])
    return float(np.polyfit(nodes, np.log(metric(lines, name)), 1)[0])


def figures(lines: Sequence[Line]) -> list[str]:
    """Name the times that a strategy has: profiling only where it takes any."""
    return ["round_s", "start_s"] if lines[-1]["metrics"]["start_s"] > 0.05 else ["round_s"]


def scale_table(groups: dict[str, list[Line]]) -> str:
    """Tabulate time and memory by strategy and number of nodes."""
    rows, first = [], next(iter(groups.values()))
    for name, lines in groups.items():
        ms = [
            [1e3 * x["metrics"][f"round_s{end}"] for end in ("", "_least", "_most")] for x in lines
        ]
        times = [f"{median:.1f} ({least:.1f} to {most:.1f})" for median, least, most in ms]
        rows.append([name, "ms a round (least to most)", *times, f"{growth(lines, 'round_s'):.2f}"])
        memory = [f"{x['metrics']['grid_mb'] + x['metrics']['run_mb']:.1f}" for x in lines]
        rows.append(["", "MB for grid and run", *memory, ""])
        if "start_s" in figures(lines):
            start = [f"{seconds:.2f}" for seconds in metric(lines, "start_s")]
            e = f"{growth(lines, 'start_s'):.2f}"
            rows.append(["", "s once, to profile all nodes", *start, e])
    sizes = [f"{line['case']['nodes']:,} nodes" for line in first]
    return tables.table(["strategies", "figure", *sizes, "growth e"], rows) + "\n"


def drift(groups: dict[str, list[Line]]) -> str:
    """Say whether late rounds cost more than early ones in the largest fleet."""
    largest = {name: lines[-1]["metrics"] for name, lines in groups.items()}
    parts = [
        f"{name}: {m['second_half_s'] / m['first_half_s']:.2f} times the CPU time and "
        f"{1e3 * m['mb_per_round']:.0f} kB more a round"
        for name, m in largest.items()
    ]
    return f"Second half of the rounds against the first, largest fleet: {'; '.join(parts)}.\n\n"


def scale(lines: list[Line], path: Path) -> dict[str, Any]:
    """Tabulate and draw growth, for some of the nodes a round and for all."""
    every = [line for line in lines if line["case"]["cohort"] == line["case"]["nodes"]]
    some = [line for line in lines if line not in every]
    text, panels, steepest = "", {}, 0.0
    for own, title in ((some, "{cohort} nodes train a round"), (every, "all nodes train a round")):
        groups = record.by(own, "strategy")
        if not groups or min(map(len, groups.values())) < 2:
            continue
        title, curves = title.format(**own[0]["case"]), {}
        text += f"### {title.capitalize()}, {own[0]['case']['rounds']} rounds\n\n"
        text += scale_table(groups) + (drift(groups) if own is some else "")
        for name, mine in groups.items():
            for figure in figures(mine):
                # 1.5 lies half-way between linear and quadratic
                steepest = max(steepest, growth(mine, figure))
                label = name if figure == "round_s" else f"{name}, profiling once"
                curves[label] = ([x["case"]["nodes"] for x in mine], metric(mine, figure))
        panels[title] = curves
    if not panels:
        return {}
    labels = ("nodes in the fleet", "CPU seconds")
    plots.draw(panels, path, *labels, xscale="log", yscale="log")
    verdict = "nothing is quadratic" if steepest < 1.5 else "SOMETHING GROWS TOO FAST"
    return {"scale": text, "steepest": steepest, "verdict": verdict}


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    """Return the parts of the page; draw the figure."""
    groups = record.by(lines, "experiment")
    parts: dict[str, Any] = {f"{k}_versions": record.software(own) for k, own in groups.items()}
    for name, section in (("selection", selection), ("overhead", overhead), ("mean", means)):
        if name in groups:
            parts |= {name: section(groups[name]), f"{name}_case": groups[name][0]["case"]}
    if "scale" in groups:
        parts |= scale(groups["scale"], folder / "scale.png")
    if "memory" in groups:
        head = ["process", "resident MB", "private MB", "peak resident MB"]
        parts["memory"] = tables.table(head, tables.rows(groups["memory"], MEMORY))
    return parts

"""Selection, TiFL over FedAvg, weighted mean, growth with the fleet, memory of a node."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.tables import Line, by, draw, metric, of, read, software, table

FIGURES = ("round_s", "start_s")
MEAN_CLAIM = """## Weighted mean of ArrayRecords, in place

Claim: at 50 nodes x 10 MB at least 2x faster and at most half the extra memory of
`flwr.serverapp.strategy.strategy_utils.aggregate_arrayrecords`, same result to rounding.
Both are timed turn by turn in one process; extra memory is the peak of `tracemalloc` during
one call, the result included.

"""
SCALE = """## Scale: time and memory per round at 100, 1,000 and 10,000 nodes

Question: does any step of LocalGrid or of the strategies grow faster than the fleet? The model is
a vector of 20 numbers, so that the figures are what the machinery itself costs. Times are CPU
seconds of the one process that plays server and all nodes, the ClientApp's own function taken
off; a round is the median of its rounds. The growth is the exponent e of nodes^e, a straight line
through the logarithms: 0 does not grow, 1 grows with the fleet, 2 would be quadratic. Memory is
what stays resident. TiFL has five tiers: of 100 nodes a tier has 20, and 20 train a round.

"""
MEMORY = """## Memory of a node

Processes of a real fleet with one SuperNode, one thread; 28 x 28 images; one run, the highest
figures seen; {versions}. "Resident" counts shared libraries, "private" is what the process takes
from the others. What that means for each Jetson: [deploy/jetson.md](../../deploy/jetson.md#memory).

"""


def selection(lines: list[Line]) -> str:
    rows = [
        [f"{line['case']['nodes']:,}", f"{m['mean_ms']:.2f}", f"{m['median_ms']:.2f}",
         f"{m['most_ms']:.1f}"]
        for line in lines for m in [line["metrics"]]
    ]  # fmt: skip
    return (
        "## What selection costs\n\nCPU milliseconds a round until 100 instructions are ready, "
        f"TiFL around FedAvg.\n\n{table(['known nodes', 'mean', 'median', 'most'], rows)}\n"
    )


def overhead(lines: list[Line]) -> str:
    text = ""
    for line in lines:
        case, m = line["case"], line["metrics"]
        text += (
            f"CPU time over FedAvg alone, {case['nodes']} nodes x {case['megabytes']:g} MB, "
            f"{case['repeats']} rounds turn by turn:\n"
        )
        for i, part in enumerate(("time in the strategy", "whole round on LocalGrid")):
            text += (
                f"{part} {m['fedavg_s'][i]:.2f} s to {m['tifl_s'][i]:.2f} s, overhead "
                f"{m['overhead'][i]:+.1%} ({m['overhead_least'][i]:+.1%} to "
                f"{m['overhead_most'][i]:+.1%}).\n"
            )
    return text + "\n"


def mean(lines: list[Line]) -> str:
    rows = []
    for line in lines:
        m = line["metrics"]
        ours, theirs = m["ours_extra_bytes"], m["flower_extra_bytes"]
        rows.append(
            [line["case"]["name"], f"{m['flower_s']:.3f} s", f"{m['ours_s']:.3f} s",
             f"{m['speedup']:.1f}x ({m['speedup_least']:.1f} to {m['speedup_most']:.1f})",
             f"{ours / 1e6:.1f} of {theirs / 1e6:.1f} MB ({ours / theirs:.0%})",
             f"{m['largest_difference']:.1e}", f"{m['flower_integers']} -> {m['our_integers']}"]
        )  # fmt: skip
    head = ["layout", "Flower", "ours", "speed-up (least to most)", "extra memory", "difference",
            "integers"]  # fmt: skip
    case = lines[0]["case"]
    return (
        f"{MEAN_CLAIM}{table(head, rows)}\n{case['nodes']} nodes x {case['megabytes']:g} MB, "
        f"median of {case['repeats']}, one thread; {software(lines)}.\n\n"
    )


def growth(lines: Sequence[Line], name: str) -> float:
    """Return the exponent of a figure in the number of nodes."""
    nodes = np.log([line["case"]["nodes"] for line in lines])
    return float(np.polyfit(nodes, np.log(metric(lines, name)), 1)[0])


def profiles(lines: Sequence[Line]) -> bool:
    return lines[-1]["metrics"]["start_s"] > 0.05


def scale_table(groups: dict[str, list[Line]]) -> str:
    rows = []
    for name, lines in groups.items():
        figures = [line["metrics"] for line in lines]
        rounds = [
            f"{1e3 * m['round_s']:.1f} ({1e3 * m['round_s_least']:.1f} to "
            f"{1e3 * m['round_s_most']:.1f})"
            for m in figures
        ]
        e = f"{growth(lines, 'round_s'):.2f}"
        rows.append([name, "ms a round (least to most)", *rounds, e])
        memory = [f"{m['grid_mb'] + m['run_mb']:.1f}" for m in figures]
        rows.append(["", "MB for grid and run", *memory, ""])
        if profiles(lines):
            start = [f"{m['start_s']:.2f}" for m in figures]
            e = f"{growth(lines, 'start_s'):.2f}"
            rows.append(["", "s once, to profile all nodes", *start, e])
    first = next(iter(groups.values()))
    head = ["strategies", "figure", *(f"{line['case']['nodes']:,} nodes" for line in first)]
    return table([*head, "growth e"], rows) + "\n"


def drift(groups: dict[str, list[Line]]) -> str:
    """Say whether late rounds cost more than early ones in the largest fleet."""
    largest = {name: lines[-1]["metrics"] for name, lines in groups.items()}
    parts = [
        f"{name}: {m['second_half_s'] / m['first_half_s']:.2f} times the CPU time and "
        f"{1e3 * m['mb_per_round']:.0f} kB more a round"
        for name, m in largest.items()
    ]
    return f"Second half of the rounds against the first, largest fleet: {'; '.join(parts)}.\n\n"


def scale(lines: list[Line], folder: Path) -> str:
    all_nodes = [line for line in lines if line["case"]["cohort"] == line["case"]["nodes"]]
    some = by([line for line in lines if line not in all_nodes], "strategy")
    every, text, steepest = by(all_nodes, "strategy"), SCALE, 0.0
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for groups, title in (
        (some, "{cohort} nodes train a round"),
        (every, "all nodes train each round"),
    ):
        if not groups or len(next(iter(groups.values()))) < 2:
            continue
        case = next(iter(groups.values()))[0]["case"]
        title = title.format(**case)
        text += f"### {title[0].upper()}{title[1:]}, {case['rounds']} rounds\n\n"
        text += scale_table(groups) + (drift(groups) if groups is some else "")
        curves = panels.setdefault(title, {})
        for name, mine in groups.items():
            for figure in FIGURES[: 1 + profiles(mine)]:
                steepest = max(steepest, growth(mine, figure))
                label = name if figure == "round_s" else f"{name}, profiling once"
                curves[label] = ([x["case"]["nodes"] for x in mine], metric(mine, figure))
    if panels:
        labels = ("nodes in the fleet", "CPU seconds")
        draw(panels, folder / "scale.png", *labels, xscale="log", yscale="log")
        text += "![CPU time against nodes](scale.png)\n\n"
    verdict = "nothing is quadratic" if steepest < 1.5 else "SOMETHING GROWS TOO FAST"
    return text + (
        f"The steepest growth is {steepest:.2f}: {verdict}.\n\n"
        "One run per row, seed 0; the spread is that of its rounds. The machine was shared, so "
        f"that single rounds took several times the median. {software(lines)}.\n\n"
    )


def memory(lines: list[Line]) -> str:
    keys = ("resident", "private", "peak")
    rows = [
        [line["case"]["name"], *(f"{line['metrics'][key]:,.0f}" for key in keys)]
        for line in lines
    ]  # fmt: skip
    head = ["process", "resident MB", "private MB", "peak resident MB"]
    return MEMORY.format(versions=software(lines)) + table(head, rows)


def report(folder: Path) -> str:
    """Make the page and the figure from a folder's results."""
    lines = read(folder)
    text = (
        "# What it costs\n\n`python -m benchmarks.bench cost --data DIR`, on a quiet machine.\n\n"
    )
    for section in (selection, overhead, mean, scale, memory):
        if mine := of(lines, experiment=section.__name__):
            text += section(mine, folder) if section is scale else section(mine)
    return text

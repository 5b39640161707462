"""Turn ``results.jsonl`` into ``report.md`` and ``scale.png``; never runs anything."""

import json
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib.figure import Figure

HERE = Path(__file__).parent
Line = dict

HEAD = """# Scale: time and memory per round at 100, 1,000 and 10,000 nodes

Question: does any step of LocalGrid or of the strategies grow faster than the fleet? The model is
a vector of 20 numbers, so that the figures are what the machinery itself costs. Times are CPU
seconds of the one process that plays server and all nodes, the ClientApp's own function taken
off; a round is the median of its rounds. The growth is the exponent e of nodes^e, a straight line
through the logarithms: 0 does not grow, 1 grows with the fleet, 2 would be quadratic. Memory is
what stays resident. TiFL has five tiers: of 100 nodes a tier has 20, and 20 train a round.

`python benchmarks/scale/run.py && python benchmarks/scale/report.py`

"""


def read() -> list[Line]:
    text = (HERE / "results.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def growth(lines: list[Line], key: str) -> float:
    """Return the exponent of a figure in the number of nodes."""
    nodes, values = (np.log([line[k] for line in lines]) for k in ("nodes", key))
    return float(np.polyfit(nodes, values, 1)[0])


def series(lines: list[Line], everybody: bool) -> list[tuple[str, list[Line]]]:
    """Group the runs of one kind by nest, in the order they were made."""
    nests: dict[str, list[Line]] = {}
    for line in lines:
        if (line["rounds"] < 10) == everybody:
            nests.setdefault(line["nest"], []).append(line)
    return list(nests.items())


def table(kind: list[tuple[str, list[Line]]]) -> str:
    nodes = [line["nodes"] for line in kind[0][1]]
    heads = " | ".join(f"{n:,} nodes" for n in nodes)
    text = f"| nest | figure | {heads} | growth e |\n|{' --- |' * (3 + len(nodes))}\n"
    for nest, lines in kind:
        rounds = [
            f"{1e3 * v['round_s']:.1f} ({1e3 * v['round_s_least']:.1f} to "
            f"{1e3 * v['round_s_most']:.1f})"
            for v in lines
        ]
        memory = [f"{line['grid_mb'] + line['run_mb']:.1f}" for line in lines]
        text += f"| {nest} | ms a round (least to most) | {' | '.join(rounds)} "
        text += f"| {growth(lines, 'round_s'):.2f} |\n"
        text += f"| | MB for grid and run | {' | '.join(memory)} | |\n"
        if lines[-1]["start_s"] > 0.05:
            start = " | ".join(f"{line['start_s']:.2f}" for line in lines)
            text += (
                f"| | s once, to profile all nodes | {start} | {growth(lines, 'start_s'):.2f} |\n"
            )
    return text + "\n"


def drift(kind: list[tuple[str, list[Line]]]) -> str:
    """Say whether late rounds cost more than early ones in the largest fleet."""
    parts = [
        f"{nest}: {v[-1]['second_half_s'] / v[-1]['first_half_s']:.2f} times the CPU time and "
        f"{1e3 * v[-1]['mb_per_round']:.0f} kB more a round"
        for nest, v in kind
    ]
    return (
        "Second half of the rounds against the first, largest fleet: " + "; ".join(parts) + ".\n\n"
    )


def draw(selected: list, everybody: list) -> None:
    figure = Figure(figsize=(9, 3.6), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, kind, title in (
        (left, selected, "50 nodes train a round"),
        (right, everybody, "all nodes train each round"),
    ):
        for nest, lines in kind:
            nodes = [line["nodes"] for line in lines]
            axes.loglog(nodes, [line["round_s"] for line in lines], "o-", label=nest)
            if lines[-1]["start_s"] > 0.05:
                colour, start = axes.lines[-1].get_color(), [line["start_s"] for line in lines]
                axes.loglog(nodes, start, "s:", color=colour, label=f"{nest}, profiling once")
        axes.set(title=title, xlabel="nodes in the fleet", ylabel="CPU seconds")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(HERE / "scale.png")


def main() -> None:
    lines = read()
    selected, everybody = series(lines, False), series(lines, True)
    first, full = selected[0][1][0], everybody[0][1][0]
    steepest = max(
        growth(group, key)
        for _, group in selected + everybody
        for key in ("round_s", "start_s")
        if key == "round_s" or group[-1]["start_s"] > 0.05
    )
    text = HEAD + f"## {first['cohort']} nodes train a round, {first['rounds']} rounds\n\n"
    text += table(selected) + drift(selected)
    text += f"## All nodes train each round, {full['rounds']} rounds\n\n" + table(everybody)
    text += "![CPU time against nodes](scale.png)\n\n"
    verdict = "nothing is quadratic" if steepest < 1.5 else "SOMETHING GROWS TOO FAST"
    text += f"The steepest growth is {steepest:.2f}: {verdict}.\n\n"
    text += "One run per row, seed 0; the spread is that of its rounds. The machine was shared, so "
    text += "that single rounds took several times the median. "
    text += "flwr {flwr}, numpy {numpy}, Python {python}, {machine}.\n".format(**first)
    (HERE / "report.md").write_text(text, encoding="utf-8")
    draw(selected, everybody)
    print(text)


if __name__ == "__main__":
    main()

"""Turn the json lines of ``run.py`` into ``report.md`` and a picture per data set; never trains.

Usage: ``python benchmarks/headline/report.py [FILE.jsonl ...]``; all those beside this file if
none is named. The page is written beside the first.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).parent
BASE, WHOLE = "FedAvg", "all five"
MARGIN, LAST, WINDOW = 0.01, 10, 5
COLUMNS = {
    "virtual_s": "virtual time",
    "rounds": "rounds",
    "bytes": "bytes",
    "device_s": "device-seconds",
}
DRAWN = ("FedAvg", "FedNova", "TiFL", "biased local SGD", "CD-GraB", "all five")
HEAD = f"""# One fleet, all five

Made by `report.py` from the json lines beside it.

20 nodes with CPU shares 4, 2, 1, 0.5 and 0.1 (`paper-5`), labels dealt by Dirichlet(0.5), 3 nodes
a round, small CNN, the same learning rate for all, not tuned for any. FedAvg trains 60 rounds. The
others end when they have used as much virtual time or {{most}} times as many rounds, whichever
comes first. The settings with steps by speed end by their rounds, long before FedAvg's time is up
(last column): what they would reach in the rest of it is not measured.

The target is FedAvg's final accuracy (mean of its last {LAST} rounds) less one point, for each
seed by itself; it is reached when the mean of {WINDOW} rounds is there. Costs to the target are
shares of FedAvg's own: mean over the seeds that get there, lowest and highest in brackets.
Device-seconds, the proxy for energy, add up the time that nodes worked. TiFL's profiling counts as
time. Where the number of seeds that do not get there within their rounds is named, the means are
over the others alone.
"""
Line = dict[str, Any]


def smoothed(line: Line) -> np.ndarray:
    """Average the accuracy over the last rounds."""
    accuracy = np.array(line["accuracy"])
    sums = np.cumsum(np.insert(accuracy, 0, 0.0))
    ends = np.arange(1, len(accuracy) + 1)
    starts = np.maximum(ends - WINDOW, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def final(line: Line) -> float:
    return mean(line["accuracy"][-LAST:])


def cost_to(line: Line, target: float) -> dict[str, float] | None:
    """Find what it took to reach an accuracy; None if it was not reached."""
    reached = np.flatnonzero(smoothed(line) >= target)
    if not len(reached):
        return None
    at = int(reached[0])
    costs = {key: float(line[key][at]) for key in ("virtual_s", "bytes", "device_s")}
    return costs | {"rounds": float(at)}


def shares_of(lines: list[Line], base: dict[int, Line]) -> list[dict[str, float]]:
    """Costs to the target as parts of FedAvg's, for the seeds that get there."""
    found = []
    for line in lines:
        its = base[line["seed"]]
        own, theirs = (cost_to(run, final(its) - MARGIN) for run in (line, its))
        if own is not None and theirs is not None:
            found.append({key: own[key] / theirs[key] for key in COLUMNS})
    return found


def spread(values: list[float], form: str = "{:.2f}") -> str:
    """Write a mean with its extremes."""
    text = form.format(mean(values))
    if len(values) == 1:
        return text
    return f"{text} ({form.format(min(values))} to {form.format(max(values))})"


def missed(lines: list[Line], base: dict[int, Line]) -> str:
    """Say how many seeds do not get there, if any."""
    number = len(lines) - len(shares_of(lines, base))
    return f"; {number} of {len(lines)} not" if number else ""


def row(name: str, lines: list[Line], base: dict[int, Line]) -> str:
    """One setting: its costs to the target, and where it ends."""
    shares = shares_of(lines, base)
    faster = spread([1 / share["virtual_s"] for share in shares], "{:.1f}x") if shares else "none"
    cells = [name, faster + missed(lines, base)]
    cells += [spread([share[key] for share in shares]) if shares else "" for key in COLUMNS]
    points = [100 * final(line) for line in lines]
    deviation = f" ± {stdev(points):.1f}" if len(points) > 1 else ""
    cells.append(f"{mean(points):.1f}{deviation} %")
    used = [line["virtual_s"][-1] / base[line["seed"]]["virtual_s"][-1] for line in lines]
    cells.append(f"{len(lines[0]['accuracy']) - 1}, {100 * mean(used):.0f} %")
    return "| " + " | ".join(cells) + " |"


def gain(lines: list[Line], base: dict[int, Line]) -> str:
    """Say how much sooner than FedAvg the target is reached."""
    shares = shares_of(lines, base)
    text = f"{mean(1 / share['virtual_s'] for share in shares):.1f} times" if shares else "never"
    return text + (f" ({missed(lines, base)[2:]} within its rounds)" if missed(lines, base) else "")


def reading(runs: dict[str, list[Line]], base: dict[int, Line]) -> list[str]:
    """Say what each part has in the whole."""
    whole = runs[WHOLE]
    above = 100 * (mean(map(final, whole)) - mean(map(final, base.values())))
    lines = [
        f"All five reach the target {gain(whole, base)} sooner than FedAvg; the end is "
        f"{above:+.1f} points from FedAvg's."
    ]
    for name in (name for name in runs if name.startswith("all but ")):
        points = 100 * (mean(map(final, runs[name])) - mean(map(final, whole)))
        lines.append(
            f"Without {name.removeprefix('all but ')} it is {gain(runs[name], base)}, and the end "
            f"{points:+.1f} points from that of all five."
        )
    return lines


def draw(runs: dict[str, list[Line]], path: Path) -> None:
    """Draw accuracy against virtual time, mean over seeds."""
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    end_s = min(line["virtual_s"][-1] for line in runs[BASE])
    grid_s = np.linspace(0, end_s, 300)
    for name in (name for name in DRAWN if name in runs):
        curves = [np.interp(grid_s, line["virtual_s"], smoothed(line)) for line in runs[name]]
        last_s = min(line["virtual_s"][-1] for line in runs[name])
        shown = grid_s <= last_s
        width = 2.2 if name in (BASE, WHOLE) else 1.2
        axes.plot(grid_s[shown], 100 * np.mean(curves, axis=0)[shown], label=name, lw=width)
    axes.set(xlabel="virtual time in seconds, profiling included", ylabel="test accuracy in %")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def section(source: Path) -> list[str]:
    """Write one data set's part of the page and draw its picture."""
    lines = [json.loads(text) for text in source.read_text(encoding="utf-8").splitlines()]
    runs: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        runs[line["setting"]].append(line)
    base, first = {line["seed"]: line for line in runs[BASE]}, lines[0]
    draw(runs, source.with_suffix(".png"))
    versions = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    took_min = sum(line["took_s"] for line in lines) / 60
    return [
        f"## {first['dataset']}",
        "",
        f"{first['train_examples']} training and {first['train_examples'] // 3} test examples, "
        f"learning rate {first['learning_rate']}, {len(base)} seeds; {versions}. The runs took "
        f"{took_min:.0f} minutes one after the other, on a busy machine:",
        "",
        "```bash",
        first["command"],
        "python benchmarks/headline/report.py",
        "```",
        "",
        "| setting | faster | "
        + " | ".join(COLUMNS.values())
        + " | final accuracy | rounds made, part of FedAvg's time |",
        "| --- |" + " --- |" * (len(COLUMNS) + 3),
        *[row(name, own, base) for name, own in runs.items()],
        "",
        *reading(runs, base),
        "",
        f"![Accuracy against virtual time]({source.stem}.png)",
        "",
    ]


def main() -> None:
    sources = [Path(name) for name in sys.argv[1:]] or sorted(HERE.glob("*.jsonl"), reverse=True)
    first = json.loads(sources[0].read_text(encoding="utf-8").splitlines()[0])
    text = [HEAD.format(most=first["most"])]
    for source in sources:
        text += section(source)
    (sources[0].parent / "report.md").write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Table and plot of the synthetic experiment, from its results: never runs anything.

Usage, from the top folder: ``python -m benchmarks.cd_grab.synthetic_report [FILE.jsonl]``.
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).parent
PAPER = {
    "ID-GraB(Bal)": {5: 4.2, 10: 5.8, 20: 8.5, 50: 12.5, 100: 17.5},
    "ID-GraB(PairBal)": {5: 6.0, 10: 8.5, 20: 12.0, 50: 18.0, 100: 23.5},
    "CD-GraB": {5: 2.6, 10: 2.5, 20: 2.5, 50: 2.3, 100: 2.3},
}
"""Read off the paper's Fig. 10, a million vectors."""
TWIN = {
    1_000_000: {
        "D-RR": {5: 342, 10: 317, 20: 343, 50: 407, 100: 397},
        "ID-GraB(Bal)": {5: 4.26, 10: 5.83, 20: 8.01, 50: 11.9, 100: 16.9},
        "ID-GraB(PairBal)": {5: 6.37, 10: 8.39, 20: 11.5, 50: 17.6, 100: 25.0},
        "CD-GraB": {5: 2.66, 10: 2.48, 20: 2.45, 50: 2.44, 100: 2.21},
    },
    65_536: {
        "D-RR": {4: 92.3, 16: 99.0, 64: 81.0},
        "ID-GraB(Bal)": {4: 3.58, 16: 6.34, 64: 12.7},
        "ID-GraB(PairBal)": {4: 4.94, 16: 9.07, 64: 17.0},
        "CD-GraB": {4: 2.52, 16: 2.24, 64: 2.07},
    },
}
"""An independent implementation that is not part of this package, other seeds."""
COLOURS = dict(
    zip(
        ("D-RR", "ID-GraB(Bal)", "ID-GraB(PairBal)", "CD-GraB", "walk c=30", "walk c=4"),
        ("#7f7f7f", "#e69f00", "#56b4e9", "#d55e00", "#009e73", "#cc79a7"),
        strict=True,
    )
)


def read(path: Path) -> tuple[int, dict[tuple[int, str], np.ndarray]]:
    """Return the number of vectors and the bounds (seeds, rounds) by nodes and method."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    runs: dict[tuple[int, str], list[list[float]]] = {}
    for line in lines:
        runs.setdefault((line["nodes"], line["method"]), []).append(line["bounds"])
    return lines[0]["num-vectors"], {key: np.array(bounds) for key, bounds in runs.items()}


def table(num_vectors: int, runs: dict[tuple[int, str], np.ndarray]) -> str:
    """Write a row per number of nodes: ours, the twin's in brackets, the paper's in braces."""
    nodes = sorted({key[0] for key in runs})
    methods = list(dict.fromkeys(key[1] for key in runs))
    rows = [f"| nodes | {' | '.join(methods)} |", "| --- " * (1 + len(methods)) + "|"]
    for m in nodes:
        cells = [str(m)]
        for method in methods:
            if (m, method) not in runs:
                cells.append("not run")
                continue
            last = runs[m, method][:, -3:].mean(axis=1)
            cell = f"{last.mean():.3g}" + (f" ± {last.std(ddof=1):.2g}" if len(last) > 1 else "")
            twin = TWIN.get(num_vectors, {}).get(method, {}).get(m)
            paper = PAPER.get(method, {}).get(m) if num_vectors == 1_000_000 else None
            cell += f" [{twin:g}]" if twin else ""
            cells.append(cell + (f" {{{paper:g}}}" if paper else ""))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def plot(num_vectors: int, runs: dict[tuple[int, str], np.ndarray], path: Path) -> None:
    nodes = sorted({key[0] for key in runs})
    figure, axes = plt.subplots(
        1, len(nodes), figsize=(2.6 * len(nodes), 2.9), sharey=True, squeeze=False
    )
    for axis, m in zip(axes[0], nodes, strict=True):
        for (at, method), bounds in runs.items():
            if at == m:
                x = np.arange(1, bounds.shape[1] + 1)
                axis.plot(x, bounds.mean(axis=0), color=COLOURS[method], label=method, lw=1.8)
                axis.fill_between(
                    x, bounds.min(axis=0), bounds.max(axis=0), color=COLOURS[method], alpha=0.2
                )
        axis.set(title=f"{m} nodes", xlabel="round", yscale="log")
        axis.grid(alpha=0.25, which="both")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("herding bound (Eq. 8)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.suptitle(f"Herding bound of {num_vectors:,} vectors", x=0.01, ha="left")
    figure.legend(handles, labels, loc="upper right", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_report(path: Path) -> None:
    """Draw the results beside them, and print the table."""
    num_vectors, runs = read(path)
    plot(num_vectors, runs, path.with_suffix(".png"))
    print(table(num_vectors, runs))


if __name__ == "__main__":
    write_report(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "synthetic_1000000.jsonl")

"""Turn ``results.jsonl`` into ``report.md`` and ``curves.png``; never trains.

Usage: ``python benchmarks/biased_local_sgd/report.py [results.jsonl]``.
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

HERE = Path(__file__).parent
Line = dict[str, Any]
Key = tuple[str, str, int]

PAPER_TABLE1 = {
    "synchronous SGD": "100 / 128 / 1298 / 90.91",
    "synchronous SGD, 8 fast only": "100 / 160 / 1235 / 91.28",
    "balanced local SGD": "100 / 4 / 548 / 88.93",
    "biased local SGD, 1x epochs": "100 / 4 / 40.6 / 89.16",
    "biased local SGD, 2x epochs": "200 / 4 / 81.2 / 91.26",
    "biased local SGD, 3x epochs": "300 / 4 / 121.7 / 91.95",
}
"""CIFAR-10, ResNet20, 2 CPUs + 8 GPUs: epochs / rounds per epoch / seconds / accuracy in %."""
PAPER_TABLES_3_7 = {
    ("2+8", 16): (88.83, 89.71),
    ("2+8", 4): (88.09, 89.47),
    ("2+8", 1): (87.98, 89.16),
    ("1+1", 16): (91.16, 91.63),
    ("1+1", 4): (90.58, 91.22),
    ("1+1", 1): (90.21, 91.08),
}
"""CIFAR-10, ResNet20: unbiased and biased accuracy in %."""
NOTES = {
    "federated": "Where nodes hold different classes (Dirichlet 0.3), weighting by steps averages "
    "lower, but the\ndifference (1.3 points) is within the spread over seeds (1.3 to 2.4): three "
    "seeds do not settle it. FedNova scales the update of a\nnode with few steps up, and with it "
    "that node's noise.",
    "links": "The widest gap between ten step times in even proportion is no gap: two classes make "
    "all nodes\nfast, which is balanced local SGD. A deadline gives each node what fits between "
    "its transfers.",
}
"""What a table shows, in words."""
NAMES = {
    "table2": "Do the slow nodes help? (Table 2; paper, CIFAR-10: 88.75 -> 89.16 %)",
    "table6": "Separate and unified sampling (Table 6; paper, CIFAR-10: 89.16 and 88.96 %)",
    "knobs": "Strength of the sampling bias",
    "federated": "Private data: weighting by steps beside FedNova",
    "links": "Budgets on ten different devices, half of them with slow links, at equal time (cnn)",
}


def spread(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else float("nan")


def percent(values: list[float]) -> str:
    return f"{100 * mean(values):.2f} ± {100 * spread(values):.2f}"


def grouped(lines: list[Line], experiment: str) -> dict[Key, list[Line]]:
    groups: dict[Key, list[Line]] = defaultdict(list)
    for line in lines:
        if line["experiment"] == experiment:
            groups[line["fleet"], line["label"], line["slow_steps"]].append(line)
    return groups


def values(group: list[Line], name: str) -> list[float]:
    return [line[name] for line in group]


def table1(lines: list[Line]) -> str:
    groups = grouped(lines, "table1")
    base = groups.get(("2+8", "synchronous SGD", 1))
    if not base:
        return ""
    base_s = mean(values(base, "virtual_s")) / mean(values(base, "epochs"))
    text = (
        "## Equal epochs, gamma = 1/32 (Table 1)\n\n"
        "An epoch is as many examples processed, by all nodes together, as there are. Less time\n"
        "is by epoch, against synchronous SGD; every round counts with its slowest node.\n\n"
        "| algorithm | epochs | rounds per epoch | virtual s | accuracy % | less time per epoch |"
        " paper: epochs / rounds per epoch / s / % |\n| --- | --- | --- | --- | --- | --- | --- |\n"
    )
    for (_, label, _), group in groups.items():
        epochs, virtual_s = mean(values(group, "epochs")), mean(values(group, "virtual_s"))
        text += (
            f"| {label} | {epochs:.1f} | {mean(values(group, 'rounds')) / epochs:.1f} | "
            f"{virtual_s:.1f} | {percent(values(group, 'accuracy'))} | "
            f"{base_s / (virtual_s / epochs):.1f}x | {PAPER_TABLE1[label]} |\n"
        )
    return text + (
        "\nThe paper counts a biased round of 32 fast and 1 slow steps as 32 synchronous rounds;\n"
        "counted so, the factor is 32 whatever the data. By examples it is at most\n"
        "(8 x 32 + 2) / 10 = 25.8.\n"
    )


def tables_3_7(lines: list[Line]) -> str:
    groups = grouped(lines, "tables3+7")
    if not groups:
        return ""
    text = (
        "## Biased against unbiased at equal virtual time (Tables 3 and 7, Figure 4)\n\n"
        "In brackets the gain over unbiased, seed by seed, in percentage points, and whether it\n"
        "is beyond two standard errors.\n\n"
        "| slow + fast | tau_F, tau_S | unbiased % | sampling bias only % | weights bias only % |"
        " both % | paper: unbiased, biased |\n| --- | --- | --- | --- | --- | --- | --- |\n"
    )
    for (nodes, slow), paper in PAPER_TABLES_3_7.items():
        names = ("unbalanced", "sampling-bias", "weights-bias", "biased")
        accuracy = [values(groups.get((nodes, n, slow), []), "accuracy") for n in names]
        if all(accuracy):
            cells = [percent(accuracy[0])]
            cells += [f"{percent(one)} ({gain(one, accuracy[0])})" for one in accuracy[1:]]
            figures = f"{paper[0]}, {paper[1]}"
            text += f"| {nodes} | 32, {slow} | {' | '.join(cells)} | {figures} |\n"
    return text + (
        "\nThe sampling bias alone can do little in these settings: by Algorithm 1 the fast nodes\n"
        "get N_F of N samples, lambda N_F of them by loss and the rest at random from those not\n"
        "chosen, so all they miss is N - N_F samples of low loss: 11 % of the data at tau_S = 16\n"
        "and 0.8 % at tau_S = 1 with 2+8 nodes, 33 % and 3 % with 1+1. The share below, which is\n"
        "ours, makes N_F smaller.\n"
    )


def gain(accuracy: list[float], base: list[float]) -> str:
    """Say what is gained over a base, seed by seed."""
    gains = [100 * (mine - theirs) for mine, theirs in zip(accuracy, base, strict=False)]
    return f"{mean(gains):+.2f} ± {spread(gains):.2f}, {verdict(gains)}"


def verdict(gains: list[float]) -> str:
    """Call it a gain or a loss only beyond two standard errors."""
    if len(gains) < 2:
        return "one seed only"
    error = spread(gains) / len(gains) ** 0.5
    if abs(mean(gains)) > 2 * error:
        return "gain" if mean(gains) > 0 else "loss"
    return "within the noise"


def plain_table(lines: list[Line], experiment: str) -> str:
    groups = grouped(lines, experiment)
    if not groups:
        return ""
    text = f"## {NAMES[experiment]}\n\n| case | epochs | rounds | virtual s | accuracy % |\n"
    text += "| --- | --- | --- | --- | --- |\n"
    for (_, label, _), group in groups.items():
        figures = [mean(values(group, name)) for name in ("epochs", "rounds", "virtual_s")]
        text += "| {} | {:.1f} | {:.0f} | {:.1f} |".format(label, *figures)
        text += f" {percent(values(group, 'accuracy'))} |\n"
    return text + (f"\n{NOTES[experiment]}\n" if experiment in NOTES else "")


def draw_curves(lines: list[Line], path: Path) -> bool:
    """Draw accuracy against virtual time for the cases of Table 1, first seed."""
    first = [line for line in lines if line["experiment"] == "table1" and line["seed"] == 0]
    if not first:
        return False
    figure, axes = plt.subplots(figsize=(7, 4))
    for line in first:
        curve = [point for point in line["curve"] if point["virtual_s"] > 0]
        axes.plot([p["virtual_s"] for p in curve], [p["accuracy"] for p in curve], marker=".",
                  label=line["label"])  # fmt: skip
    axes.set(xscale="log", xlabel="virtual time (s)", ylabel="test accuracy")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines.sort(key=lambda line: line["seed"])  # so that differences pair like with like
    first = lines[0]
    seeds = len({line["seed"] for line in lines})
    head = (
        "# Biased local SGD on emulated fleets\n\n"
        "`python benchmarks/biased_local_sgd/run.py --dataset ../shared/data/fashion_mnist "
        f"--samples {first['samples']}`,\n"
        "then `python benchmarks/biased_local_sgd/report.py`; flwr 1.41.0, torch 2.12.1, "
        "numpy 2.4.6.\n\n"
        f"{first['dataset']}, {first['samples']} examples, model `{first['model']}`, "
        f"{first['base_epochs']:g} epochs where not said otherwise, {seeds} seeds,\n"
        "mean ± standard deviation. Virtual time: nobody sleeps. The learning rate falls to a\n"
        "tenth at 60 % and 80 % of a run, as in the paper.\n"
        'All nodes see all data but under "Private data" and where said.\n'
    )
    parts = [head, table1(lines), tables_3_7(lines)]
    parts += [plain_table(lines, name) for name in NAMES]
    if draw_curves(lines, path.with_name("curves.png")):
        parts.insert(2, "![accuracy against virtual time](curves.png)\n")
    report = "\n".join(part for part in parts if part)
    path.with_name("report.md").write_text(report, encoding="utf-8")
    print(report)


if __name__ == "__main__":
    main()

"""Turn the json lines of this folder into ``report.md`` and figures; never runs anything."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from curves import (
    TOLERANCE,
    Line,
    final_accuracy,
    lengths,
    mean_curve,
    read_lines,
    time_to,
)
from figures import draw_curves

HERE = Path(__file__).parent

HEAD = """# TiFL

Made by `report.py` from the json lines beside it; flwr 1.41.0, torch 2.12.1, numpy 2.4.6.

```bash
python benchmarks/tifl/run.py ../shared/data/fashion_mnist --rounds 60
python benchmarks/tifl/digits.py
python benchmarks/tifl/order_statistics.py
python benchmarks/tifl/time_estimate.py
python benchmarks/tifl/selection_cost.py
python benchmarks/tifl/report.py
```

The paper's experiments have one seed here: differences of a point are chance.

"""
PAPER_SAYS = {
    "resource": "fast almost 11x, uniform over 6x faster; accuracies within 3.71 points",
    "quantity": "up to 3x faster; fast loses accuracy (10 % of the data), slow keeps it",
    "non-IID(2)": "times alike; vanilla and uniform lose least accuracy, adaptive is best",
    "non-IID(5)": "times alike; vanilla and uniform lose least accuracy, adaptive is best",
    "non-IID(10)": "times alike; vanilla and uniform lose least accuracy, adaptive is best",
    "resource + non-IID(5)": "times as under resource, accuracies a little lower",
    "combined": "adaptive as accurate as vanilla in almost half the time; fast loses most",
}
"""Section 5.2 of the paper, on CIFAR-10, 500 rounds, mean of 5 runs."""

TABLE_2 = {
    "slow": (46242, 44977, 2.76),
    "uniform": (12693, 12643, 0.4),
    "random": (5143, 5053, 1.8),
    "fast": (1837, 1750, 5.01),
}
"""The paper's estimate and actual time in s, and its MAPE in %."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def pick(lines: Sequence[Line], **wanted: object) -> list[Line]:
    """Take the lines that have these values."""
    return [line for line in lines if all(line[key] == value for key, value in wanted.items())]


def names(lines: Sequence[Line], key: str) -> list[str]:
    """Return the values of a key in order of appearance."""
    return list(dict.fromkeys(str(line[key]) for line in lines))


def share(value: float) -> str:
    return "never" if np.isnan(value) else f"{value:.2f}"


def race_rows(lines: Sequence[Line], key: str) -> list[list[str]]:
    """Compare runs with vanilla's: length, final accuracy and time to target."""
    vanilla = pick(lines, **{key: "vanilla"})
    unit_s = lengths(vanilla)
    target = final_accuracy(vanilla) - TOLERANCE
    rows = []
    for name in names(lines, key):
        mine = pick(lines, **{key: name})
        took = np.mean([line["clock_s"][-1] for line in mine])
        faster = np.mean([unit_s[line["seed"]] / line["clock_s"][-1] for line in mine])
        rounds = np.mean([len(line["accuracy"]) - 1 for line in mine])
        without = time_to(target, *mean_curve(mine, unit_s))
        with_it = time_to(target, *mean_curve(mine, unit_s, profiling=True))
        rows.append(
            [name, f"{rounds:.0f}", f"{took:.0f} s", f"{faster:.1f}x",
             f"{100 * final_accuracy(mine):.1f} %", share(without), share(with_it)]
        )  # fmt: skip
    return rows


RACE_HEAD = ["policy", "rounds", "virtual time", "faster than vanilla", "final accuracy",
             "time to target", "with profiling"]  # fmt: skip
RACE_NOTE = (
    "Final accuracy is the mean of the last 10 rounds. Time to target: when the mean over seeds\n"
    "(5 rounds smoothed) comes within one point of vanilla's final accuracy, as a share of\n"
    "vanilla's whole run; the last column adds TiFL's profiling, which vanilla does not need.\n"
    "Vanilla gets there before its own end, too: like for like is the ratio to its own share.\n\n"
)


def experiments(lines: Sequence[Line]) -> str:
    text = "## The paper's experiments\n\n" + RACE_NOTE
    for case in names(lines, "case"):
        mine = pick(lines, case=case)
        seeds = len({line["seed"] for line in mine})
        text += (
            f"### {case}\n\n{mine[0]['dataset']}, {seeds} seed(s). Paper: {PAPER_SAYS[case]}.\n\n"
        )
        text += table(RACE_HEAD, race_rows(mine, "policy")) + "\n"
    draw_curves({c: pick(lines, case=c) for c in names(lines, "case")}, "policy", "experiments.png")
    return text + "![Accuracy against virtual time](experiments.png)\n\n"


def digits(lines: Sequence[Line]) -> str:
    rounds = pick(lines, setting="vanilla")[0]["rounds"]
    seeds = len({line["seed"] for line in lines})
    text = (
        f"## Digits: which setting\n\n20 nodes, fleet paper-5, Dirichlet(0.5), 3 nodes a round, "
        f"{seeds} seeds; vanilla trains {rounds} rounds, the others for half its virtual time. "
        f"Profiling is one round: emulated devices have no cold start.\n\n{RACE_NOTE}"
    )
    draw_curves({"digits": lines}, "setting", "digits.png")
    text += table(RACE_HEAD, race_rows(lines, "setting"))
    return text + "\n![Accuracy against virtual time](digits.png)\n\n"


def time_estimate(lines: Sequence[Line]) -> str:
    rows = []
    for policy in names(lines, "policy"):
        estimate, actual, error = TABLE_2[policy]
        for jitter in sorted({line["jitter"] for line in lines}):
            mine = pick(lines, policy=policy, jitter=jitter)
            paper, exact = ([line[key] for line in mine] for key in ("paper_mape", "exact_mape"))
            rows.append(
                [policy, f"{jitter:.0%}", f"{np.mean(paper):.2f} ({max(paper):.2f})",
                 f"{np.mean(exact):.2f} ({max(exact):.2f})",
                 f"{error} ({estimate} s against {actual} s)"]
            )  # fmt: skip
    head = ["policy", "jitter", "Eq. 6: MAPE in %", "exact: MAPE in %", "paper's Eq. 6"]
    facts = "{rounds} rounds, {sync_rounds} profiling rounds; mean over seeds (worst)."
    return (
        "## Time estimate\n\n"
        + facts.format(**lines[0])
        + " Our Eq. 6 is always too low (it takes\n"
        "a node's typical latency for the slowest of five), the paper's always too high. The\n"
        "paper's own four estimates cannot all come from Eq. 6: uniform, slow and fast fix the\n"
        "sum of the middle tiers' latencies to 30.8 s, and then random is 4880 s at most.\n\n"
        + table(head, rows)
        + "\n"
    )


def order_statistics(lines: Sequence[Line]) -> str:
    rows = [
        [line["policy"], f"{line['round_s']:.3f} s", f"{line['expected_s']:.3f} s",
         f"{line['mape']:.2f} %", f"{100 * line['standard_error']:.2f} %",
         f"{line['times_faster']:.2f}x"]
        for line in lines
    ]  # fmt: skip
    head = ["policy", "mean round", "expected", "error", "standard error", "faster than vanilla"]
    return (
        "## Static policies against order statistics\n\n"
        "50 nodes, latency 1 / CPU share (4, 2, 1, 0.5, 0.1), no jitter, 5 nodes a round. The\n"
        "claim is an error of at most 3 %. The paper's text (uniform 6x, fast 11x) does not\n"
        "follow from its own Table 2, where uniform takes 0.28 of slow's time.\n\n"
        + table(head, rows)
        + "\n"
    )


def selection_cost(lines: Sequence[Line]) -> str:
    rows = [
        [f"{line['nodes']:,}", f"{line['mean_ms']:.2f}", f"{line['median_ms']:.2f}",
         f"{line['most_ms']:.1f}"]
        for line in pick(lines, what="selection")
    ]  # fmt: skip
    text = (
        "## What selection costs\n\nCPU milliseconds a round until 100 instructions are ready.\n\n"
    )
    text += table(["known nodes", "mean", "median", "most"], rows) + "\n"
    for line in pick(lines, what="overhead"):
        least, most = line["overhead_least"], line["overhead_most"]
        text += (
            "CPU time over FedAvg alone, {nodes} nodes x {megabytes:g} MB, {rounds} rounds turn by "
            "turn:\n".format(**line)
        )
        for i, part in enumerate(("time in the strategy", "whole round on LocalGrid")):
            text += (
                f"{part} {line['fedavg_s'][i]:.2f} s to {line['tifl_s'][i]:.2f} s, overhead "
                f"{line['overhead'][i]:+.1%} ({least[i]:+.1%} to {most[i]:+.1%}).\n"
            )
    return text + "\n"


SECTIONS: dict[str, Callable[[Sequence[Line]], str]] = {
    "results.jsonl": experiments,
    "digits.jsonl": digits,
    "time_estimate.jsonl": time_estimate,
    "order_statistics.jsonl": order_statistics,
    "selection_cost.jsonl": selection_cost,
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    text = HEAD
    for name, section in SECTIONS.items():
        if lines := read_lines(HERE / name):
            text += section(lines)
    (HERE / "report.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

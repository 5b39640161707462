"""How costs grow with the fleet, what simulations cost, and the memory of a node."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flwr_hetero_studies.core import record, tables
from flwr_hetero_studies.core.record import Line, metric

MEMORY = {"resident": "resident MB", "private": "private MB", "peak": "peak resident MB"}

MS = ("encode_ms", "decode_ms")
ENGINES = {"work": "app", "server": "server", "queue": "queue", "rest": "rest", "workers": "others"}
"""Who spends the CPU time of a reply, and the heads of their columns."""


def growth(lines: Sequence[Line], name: str) -> float:
    nodes = np.log([line["case"]["nodes"] for line in lines])
    return float(np.polyfit(nodes, np.log(metric(lines, name)), 1)[0])


def scale_table(groups: dict[str, list[Line]]) -> tuple[str, float]:
    """Tabulate time and memory by strategy and number of nodes; return the steepest growth too."""
    rows, exponents = [], []
    for name, lines in groups.items():
        sizes = [f"{line['case']['nodes']:,} nodes" for line in lines]
        metrics = [line["metrics"] for line in lines]
        times = [f"{1e3 * m['round_s']:.1f}" for m in metrics]
        exponents.append(growth(lines, "round_s"))
        rows.append([name, "ms a round", *times, f"{exponents[-1]:.2f}"])
        memory = [f"{m['grid_mb'] + m['run_mb']:.1f}" for m in metrics]
        rows.append(["", "MB", *memory, ""])
        # only a strategy that profiles takes any time before its first round
        if metrics[-1]["start_s"] > 0.05:
            exponents.append(growth(lines, "start_s"))
            start = [f"{m['start_s']:.2f}" for m in metrics]
            rows.append(["", "s to profile all", *start, f"{exponents[-1]:.2f}"])
    head = ["strategies", "figure", *sizes, "growth e"]
    return tables.table(head, rows) + "\n", max(exponents)


def drift(groups: dict[str, list[Line]]) -> str:
    """Say whether late rounds cost more than early ones in the largest fleet."""
    largest = {name: lines[-1]["metrics"] for name, lines in groups.items()}
    parts = [f"{name} {m['second_half_s'] / m['first_half_s']:.2f}, "
             f"{1e3 * m['mb_per_round']:.0f} kB" for name, m in largest.items()]  # fmt: skip
    text = "CPU time of late rounds over early ones, and more memory a round, largest fleet"
    return f"{text}: {'; '.join(parts)}.\n\n"


def scale(lines: list[Line]) -> dict[str, Any]:
    every = [line for line in lines if line["case"]["cohort"] == line["case"]["nodes"]]
    some = [line for line in lines if line not in every]
    text, steepest = "", 0.0
    for own, title in ((some, "{cohort} nodes train a round"), (every, "All nodes train a round")):
        groups = record.by(own, "strategy")
        if not groups or min(map(len, groups.values())) < 2:
            continue
        text += f"### {title}, {{rounds}} rounds\n\n".format(**own[0]["case"])
        made, e = scale_table(groups)
        text, steepest = text + made + (drift(groups) if own is some else ""), max(steepest, e)
    # half-way between linear and quadratic
    verdict = "nothing is quadratic" if steepest < 1.5 else "SOMETHING GROWS TOO FAST"
    return {"scale": text, "steepest": steepest, "verdict": verdict} if text else {}


def engines(lines: list[Line]) -> str:
    """Tabulate what a reply costs in Ray and in LocalGrid; compare both, job by job."""
    rows, texts = [], []
    for (job, nodes), own in record.by(lines, "job", "nodes").items():
        found = {line["case"]["engine"]: line["metrics"] for line in own}
        for engine, m in found.items():
            ms = [f"{m[f'{name}_ms']:.2f}" for name in ENGINES]
            counts = [f"{m['replies']:,.0f}", f"{m['lost']:.0f}", f"{m['per_s']:,.0f}"]
            memory = f"{m['mb']:,.0f} + {m['more_mb']:.1f}"
            rows.append([f"{job}, {nodes:,} nodes", engine, *counts, *ms, memory])
        if len(found) == 2:
            ray, local = found["Ray"], found["LocalGrid"]
            sums = [sum(m[f"{name}_ms"] for name in ENGINES) for m in (ray, local)]
            times, share = local["per_s"] / ray["per_s"], ray["queue_ms"] / sums[0]
            texts.append(
                f"{job}, {nodes:,} nodes: LocalGrid has {times:.1f} times Ray's replies a second "
                f"for {sums[1] / sums[0]:.2f} of its CPU time; Ray's queue {share:.0%} of its own"
            )
    head = ["job", "engine", "replies", "lost", "replies/s"]
    head += [f"{name}, ms" for name in ENGINES.values()] + ["server's MB"]
    return tables.table(head, rows) + "\n" + "".join(f"- {text}.\n" for text in texts)


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    groups = record.by(lines, "experiment")
    software = record.software(lines, "flwr", "torch", "python", "machine")
    parts: dict[str, Any] = {"software": software}
    if "scale" in groups:
        parts |= scale(groups["scale"])
    if "memory" in groups:
        rows = [
            [line["case"]["name"], *(f"{line['metrics'][key]:,.0f}" for key in MEMORY)]
            for line in groups["memory"]
        ]
        parts["memory"] = tables.table(["process", *MEMORY.values()], rows)
    if simulated := [*groups.get("ray", []), *groups.get("speed", [])]:
        parts["engines"] = engines(simulated)
    if "codec" in groups:
        rows = [
            [line["case"]["name"], f"{own['share']:.3f}", *(f"{own[k]:.1f}" for k in MS)]
            for line in groups["codec"] for own in [line["metrics"]]
        ]  # fmt: skip
        parts["codec"] = tables.table(["codec", "bytes", "ms to encode", "ms to decode"], rows)
    return parts

"""What faults cost, how the soak went, and predicted against real round times."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.tables import Line, draw, of, read, software, table

SETTLED = 0.2
"""Part of the soak after which memory is compared: before it, nodes are still met for the first
time."""
SHORT = 1.2
"""A device whose own report is this many times what its share allows did not get its share."""
PENDING_KB = 2
"""Of a message with this model that was never fetched, by tracemalloc in a run of 140 rounds."""
HEAD = """# Faults

What goes wrong in real fleets, and what it costs. `python -m benchmarks.bench faults`, on a quiet \
machine.

"""
PROCESS = """## Real processes

One SuperLink with a database, four SuperNodes with TLS and keys, one ServerApp, TiFL around FedAvg
on the toy app of the tests. Every fault is done once to real processes (`scenarios.py`); the tests
of real fleets assert on the same runs. {versions}, {cores} cores shared with other work (load
{low:g} to {high:g}), so seconds are upper bounds.

"Rounds lost" are rounds without any result, or done again. "Seconds lost" is how much longer the
round took than the median round of its run without failures ({usual});
faults in the same round of a scenario share its seconds. "Lost later" counts replies of the node
that were lost, without another fault, after the round that followed.

"""
SOAK = """## Soak

{nodes:,} nodes and {rounds:,} rounds on a LocalGrid, seed 0,
`Recorded(OverSelect(TiFL(BiasedLocalSGD(CDGraB(FedAdam)))))`, 40 nodes asked and 24 waited for, a
time-out of 30 s. In every round 5 % of the nodes each: never answer, answer with an error, answer
too late, send garbage, claim steps, a latency or an order version that cannot be, are away.
{versions}.

"""
GROWTH = """
![Resident memory and failures over the rounds](soak.png)

In the end {pending:,} messages had never been answered or never been fetched. An
emulated grid keeps them, as a SuperLink does for their time to live: about 2 kB each with this
model, {megabytes:.0f} MB of the growth. The steps are the profilings of all nodes every 250 rounds.
Nearly every round lasts its 30 s, for evaluation waits for late nodes.

"""
PREDICTION = """## The emulated fleet against real processes

Three SuperNodes held at a share of one CPU, one of them a round, the same app and strategy on a
LocalGrid with the same shares; {work:g} CPU seconds of work a message. An emulated device knows its
compute time. The constant of a deployment (Flower's polling, and a new ClientApp process for each
message, which a slow device starts slowly) is **not** in the emulation: it is measured per device
by the same run without work, and added. Medians over the rounds in which the device trained; load
{load:g} on {cores} cores.

"""


def process(lines: Sequence[Line]) -> str:
    """Tabulate the faults of real processes."""
    faults = [fault for line in lines for fault in line["metrics"]["faults"]]
    loads = [line["metrics"]["load"] for line in lines]
    usual = sorted({fault["usual_round_s"] for fault in faults if "usual_round_s" in fault})
    rows = []
    for fault in faults:
        reason = fault.get("error") or fault.get("reason")
        says = "; ".join(filter(None, [reason and f"`{reason}`", fault.get("note")]))
        cells = [fault.get(key, "") for key in ("replies_lost", "rounds_lost", "seconds_lost",
                                                "lost_later")]  # fmt: skip
        survived = "yes" if fault["survived"] else "**no**"
        rows.append([fault["fault"], fault.get("injected", ""), survived, *cells,
                     says.replace("|", "/")])  # fmt: skip
    head = ["fault", "injected", "run survived", "replies lost", "rounds lost", "seconds lost",
            "lost later", "what the history says"]  # fmt: skip
    about = {"low": min(loads), "high": max(loads), "cores": lines[0]["metrics"]["cores"]}
    spread = f"{usual[0]:g} to {usual[-1]:g} s" if usual else "none"
    text = PROCESS.format(**about, usual=spread, versions=software(lines, "flwr", "python"))
    return f"{text}{table(head, rows)}\n"


def soak(lines: Sequence[Line], path: Path) -> str:
    """Tabulate and draw the soak."""
    (line,) = lines
    last, curve = line["metrics"], {k: np.array(v) for k, v in line["curve"].items()}
    rounds, memory = curve["round"], curve["resident_mb"]
    late = rounds >= SETTLED * last["round"]
    slope = float(np.polyfit(rounds[late], memory[late], 1)[0]) * 1000
    struck = {k.removeprefix("struck: "): n for k, n in last.items() if k.startswith("struck")}
    failures = np.diff(curve["failures"]) / np.diff(rounds)
    panels = {"memory": {"": (rounds, memory)}, "failures": {"": (rounds[1:], failures)}}
    draw(panels, path, "round", ("resident MB", "failures a round"), columns=1, size=(7, 2),
         ylim=(0, None))  # fmt: skip
    done = f"{last['round']:,} of {line['case']['rounds']:,}, {last['virtual_h']:.1f} virtual hours"
    rows = [
        ["rounds completed", done],
        ["nodes asked", f"{last['replies asked']:,}"],
        ["struck among them", ", ".join(f"{number:,} {kind}" for kind, number in struck.items())],
        ["failures in the history", f"{last['failures']:,}"],
        ["rounds without a result", last["rounds without result"]],
        ["mean error of the model, first to last",
         f"{curve['error'][0]:.3f} to {curve['error'][-1]:.3f}"],
        [f"resident memory at round {rounds[late][0]} and at the end",
         f"{memory[late][0]:.1f} MB, {memory[-1]:.1f} MB"],
        ["slope of a line through it from there on", f"{slope:+.1f} MB per 1,000 rounds"],
    ]  # fmt: skip
    text = SOAK.format(**line["case"], versions=software(lines, "flwr", "python"))
    pending = last["pending"]
    text += table(["what", "figure"], rows)
    return text + GROWTH.format(pending=pending, megabytes=PENDING_KB * pending / 1000)


def prediction(lines: Sequence[Line]) -> str:
    """Tabulate predicted and real round times."""
    (line,) = lines
    rows, short = [], []
    for node in line["metrics"]["nodes"]:
        predicted, times = node["emulated_s"] + node["constant_s"], node["round_all_s"]
        seconds = [node["emulated_s"], node["reported_s"], node["constant_s"], predicted]
        rows.append(
            [f"{node['cpu']:g}", *(f"{s:.1f} s" for s in seconds),
             f"{node['round_s']:.1f} s ({min(times):.1f} to {max(times):.1f}, {len(times)} rounds)",
             f"{node['round_s'] / predicted - 1:+.0%}"]
        )  # fmt: skip
        if node["reported_s"] > SHORT * node["emulated_s"]:
            short.append(f"{node['cpu']:g}")
    head = ["CPU share", "emulated", "device's report", "constant", "predicted", "real round",
            "difference"]  # fmt: skip
    about = {key: line["metrics"][key] for key in ("load", "cores")}
    text = PREDICTION.format(work=line["case"]["work"], **about) + table(head, rows)
    if short:
        text += (
            f"\nThe device with {' and '.join(short)} of a CPU did not get it: by its own clock it "
            "needed longer than its share allows, because the machine had other work. Its row says "
            "how the machine was, and nothing of the emulation.\n"
        )
    return text


def report(folder: Path) -> str:
    """Make the page and the figure from a folder's results."""
    lines, text = read(folder), HEAD
    if faults := of(lines, experiment="process"):
        text += process(faults)
    if soaks := of(lines, experiment="soak"):
        text += soak(soaks, folder / "soak.png")
    if predictions := of(lines, experiment="prediction"):
        text += prediction(predictions)
    return text

"""Turn the results of this folder into ``report.md`` and ``soak.png``; never runs a fleet.

Usage: ``python -m benchmarks.faults.report``.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

from flwr_hetero.report.style import LIGHT

HERE = Path(__file__).parent
SETTLED = 0.2
"""Part of the soak after which memory is compared: before it, nodes are still met for the first
time."""
SHORT = 1.2
"""A device whose own report is this many times what its share allows did not get its share."""

HEAD = """# Faults

What goes wrong in real fleets, and what it costs. Made by `python -m benchmarks.faults.report`
from the results beside it.

## Real processes

`python -m benchmarks.faults.run`: one SuperLink with a database, four SuperNodes with TLS and keys,
one ServerApp, TiFL around FedAvg on the toy app of `tests/deploy`. Every fault is done once to real
processes (`scenarios.py`); `tests/deploy` asserts on the same runs. Flower {flwr},
Python {python}, {cores} cores shared with other work (load {low:g} to {high:g}), so seconds are
upper bounds.

"Rounds lost" are rounds without any result, or done again. "Seconds lost" is how much longer the
round took than the median round of its run without failures ({usual});
faults in the same round of a scenario share its seconds. "Lost later" counts replies of the node
that were lost, without another fault, after the round that followed.

| {columns} |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
COLUMNS = (
    *("fault", "injected", "run survived", "replies lost", "rounds lost", "seconds lost"),
    *("lost later", "what the history says"),
)

ROW = (
    "| {fault} | {injected} | {survived} | {replies_lost} | {rounds_lost} | {seconds_lost} | "
    "{lost_later} | {says} |\n"
)

SOAK = """
## Soak

`python -m benchmarks.faults.soak`: {nodes:,} nodes and {rounds:,} rounds on a LocalGrid, seed 0,
`Recorded(OverSelect(TiFL(BiasedLocalSGD(CDGraB(FedAdam)))))`, 40 nodes asked and 24 waited for, a
time-out of 30 s. In every round 5 % of the nodes each: never answer, answer with an error, answer
too late, send garbage, claim steps, a latency or an order version that cannot be, are away. Flower
{flwr}, Python {python}.

| what | figure |
| --- | --- |
| rounds completed | {rounds:,} of {rounds:,}, {virtual_h:.1f} virtual hours |
| nodes asked | {asked:,} |
| struck among them | {struck} |
| failures in the history | {failures:,} |
| rounds without a result | {lost} |
| mean error of the model, first to last | {first_error:.3f} to {last_error:.3f} |
| resident memory at round {settled} and at the end | {early_mb:.1f} MB, {late_mb:.1f} MB |
| slope of a line through it from there on | {slope:+.1f} MB per 1,000 rounds |

![Resident memory and failures over the rounds](soak.png)

{growth}
"""

PENDING_KB = 2
"""Of a message with this model that nobody fetched, by tracemalloc in a run of 140 rounds."""
GROWTH = """In the end {pending:,} messages had never been answered or never been fetched. An
emulated grid keeps them, as a SuperLink does for their time to live: about 2 kB each with this
model, {megabytes:.0f} MB of the growth. The steps are the profilings of all nodes every 250 rounds.
Nearly every round lasts its 30 s, for evaluation waits for late nodes."""

PREDICTION = """
## The emulated fleet against real processes

`python -m benchmarks.faults.prediction`: three SuperNodes held at a share of one CPU, one of them a
round, the same app and strategy on a LocalGrid with the same shares; {work:g} CPU seconds of work a
message. An emulated device knows its compute time. The constant of a deployment (Flower's polling,
and a new ClientApp process for each message, which a slow device starts slowly) is **not** in the
emulation: it is measured per device by the same run without work, and added. Medians over the
rounds in which the device trained; load {load:g} on {cores} cores.

| CPU share | emulated | device's report | constant | predicted | real round | difference |
| --- | --- | --- | --- | --- | --- | --- |
"""

PREDICTION_ROW = (
    "| {cpu:g} | {emulated_s:.1f} s | {reported_s:.1f} s | {constant_s:.1f} s "
    "| {predicted:.1f} s | {round_s:.1f} s ({least:.1f} to {most:.1f}, {number} rounds) "
    "| {difference:+.0%} |\n"
)


def lines_of(name: str) -> list[dict[str, Any]]:
    """Read a file of json lines; none if it is not there."""
    path = HERE / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def faults_text(lines: list[dict[str, Any]]) -> str:
    """Return the table of faults."""
    loads = [line["load"] for line in lines]
    usual = sorted({line["usual_round_s"] for line in lines if "usual_round_s" in line})
    text = HEAD.format(
        **lines[0],
        low=min(loads),
        high=max(loads),
        usual=f"{usual[0]:g} to {usual[-1]:g} s" if usual else "none",
        columns=" | ".join(COLUMNS),
    )
    for line in lines:
        blank = dict.fromkeys(ROW_KEYS, "")
        reason = line.get("error") or line.get("reason")
        says = "; ".join(filter(None, [reason and f"`{reason}`", line.get("note")]))
        survived = "yes" if line["survived"] else "**no**"
        text += ROW.format(**blank | line | {"survived": survived, "says": says.replace("|", "/")})
    return text


ROW_KEYS = ("injected", "replies_lost", "rounds_lost", "seconds_lost", "lost_later")


def soak_text(lines: list[dict[str, Any]]) -> str:
    """Return the soak's table, and draw its figure."""
    last = lines[-1]
    rounds = np.array([line["round"] for line in lines])
    memory = np.array([line["resident_mb"] for line in lines])
    late = rounds >= SETTLED * last["round"]
    slope = float(np.polyfit(rounds[late], memory[late], 1)[0]) * 1000
    struck = {k.removeprefix("struck: "): n for k, n in last.items() if k.startswith("struck")}
    _draw(rounds, memory, lines)
    pending = last["pending"]
    growth = GROWTH.format(pending=pending, megabytes=PENDING_KB * pending / 1000)
    return SOAK.format(
        nodes=last["nodes"],
        flwr=last["flwr"],
        python=last["python"],
        rounds=last["round"],
        virtual_h=last["virtual_h"],
        asked=last["replies asked"],
        struck=", ".join(f"{number:,} {kind}" for kind, number in struck.items()),
        failures=last["failures"],
        lost=last["rounds without result"],
        first_error=lines[0]["error"],
        last_error=last["error"],
        settled=int(rounds[late][0]),
        early_mb=memory[late][0],
        late_mb=memory[-1],
        slope=slope,
        growth=growth,
    )


def _draw(rounds: Any, memory: Any, lines: list[dict[str, Any]]) -> None:
    numbers, failures = (np.array([line[key] for line in lines]) for key in ("round", "failures"))
    mpl.use("Agg")
    with LIGHT.applied():
        figure, (above, below) = plt.subplots(2, 1, figsize=(7, 4.2), sharex=True)
        above.plot(rounds, memory)
        above.set_xlim(0, numbers[-1])
        above.set_ylim(0, 1.2 * memory.max())
        above.set_ylabel("resident MB")
        below.plot(numbers[1:], np.diff(failures) / np.diff(numbers))
        below.set_ylim(bottom=0)
        below.set_ylabel("failures a round")
        below.set_xlabel("round")
        figure.tight_layout()
        figure.savefig(HERE / "soak.png", dpi=110)
        plt.close(figure)


def prediction_text(lines: list[dict[str, Any]]) -> str:
    """Return the table of predicted and real round times."""
    text = PREDICTION.format(
        work=lines[0]["work_cpu_s"], load=lines[-1]["load"], cores=lines[0]["cores"]
    )
    short: list[str] = []
    for line in lines:
        predicted = line["emulated_s"] + line["constant_s"]
        text += PREDICTION_ROW.format(
            **line,
            predicted=predicted,
            least=min(line["round_all_s"]),
            most=max(line["round_all_s"]),
            number=len(line["round_all_s"]),
            difference=line["round_s"] / predicted - 1,
        )
        if line["reported_s"] > SHORT * line["emulated_s"]:
            short.append(f"{line['cpu']:g}")
    if short:
        text += (
            f"\nThe device with {' and '.join(short)} of a CPU did not get it: by its own clock it "
            "needed longer than its share allows, because the machine had other work. Its row says "
            "how the machine was, and nothing of the emulation.\n"
        )
    return text


def main() -> None:
    text = ""
    for name, make in (
        ("results.jsonl", faults_text),
        ("soak.jsonl", soak_text),
        ("prediction.jsonl", prediction_text),
    ):
        if lines := lines_of(name):
            text += make(lines)
    (HERE / "report.md").write_text(text or "# Faults\n")


if __name__ == "__main__":
    main()

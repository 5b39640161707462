"""Every fault of the table, done to real SuperNodes, a real SuperLink and a real ServerApp.

Usage: ``python -m benchmarks.faults.run [--only NAME ...]``; starts a fleet of four in a folder
of its own, injects faults (see ``scenarios.py``) and writes ``results.jsonl`` beside this file, a
line per fault. Lines of scenarios that are left out are kept.
"""

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.faults import scenarios
from benchmarks.faults.experiment import durations
from flwr_hetero.fleet import RealFleet

HERE = Path(__file__).parent
Facts = dict[str, Any]

KINDS = {
    "nan": "reply holds NaN",
    "raises": "ClientApp raises",
    "memory": "ClientApp asks for more memory than there is",
    "shape": "array of another shape",
    "missing": "array is missing",
    "extra": "array too many",
    "pickle": "payload is a pickle",
    "weight": "infinite number of examples",
    "metric": "metric that the others have not",
    "latency": "claims a latency of 1e6 s",
}


def row(fault: str, facts: Facts, number: int, *nodes: str, **more: Any) -> Facts:
    """Say what a fault in a round cost; what it shares its round with is in the same seconds."""
    record, times = facts["history"][number], durations(facts["history"])
    failed = {failure["node"]: failure["reason"] for failure in record["failures"]}
    later = [r for r in facts["history"] if r["round"] > number + 1]
    again = facts.get("injected", set())
    return {
        "fault": fault,
        "round": number,
        "injected": len(nodes),
        "survived": facts["survived"],
        "replies_lost": sum(node in failed for node in nodes),
        "rounds_lost": int(not record["train"]),
        "seconds_lost": round(max(0.0, times[number] - facts["usual_round_s"]), 1),
        "usual_round_s": facts["usual_round_s"],
        "lost_later": sum(
            f["node"] in nodes and (r["round"], f["node"]) not in again
            for r in later
            for f in r["failures"]
        ),
        "reason": next((failed[node][:80] for node in nodes if node in failed), ""),
    } | more


def bad_replies(facts: Facts) -> list[Facts]:
    """Return a line per kind of bad reply."""
    words = [word.split(":") for word in scenarios.BAD_REPLIES.split()]
    facts["injected"] = {(int(number), f"node-{partition}") for partition, number, _ in words}
    return [
        row(KINDS[kind], facts, int(number), f"node-{partition}")
        for partition, number, kind in words
    ]


def frozen_and_stopped(facts: Facts) -> list[Facts]:
    """Return the lines of what happened in round 2."""
    return [
        row("SuperNode frozen past the time-out of 30 s, then thawed", facts, 2, "node-1"),
        row("SuperNode stopped politely and started again", facts, 2, "node-2"),
    ]


def killed_and_joined(facts: Facts) -> list[Facts]:
    """Return the lines of what happened in round 2, and of the late joiner."""
    joined = next(r["round"] for r in facts["history"][1:] if "node-3" in r["selected"])
    return [
        row("SuperNode killed, started again under its key", facts, 2, "node-1",
            note=f"back online after {facts['back_s']} s, {facts['starts']} starts"),
        row("ClientApp killed", facts, 2, "node-2"),
        row("a node joins during the run", facts, joined, note=f"trains from round {joined} on",
            injected=1),
    ]  # fmt: skip


def _redone(fault: str, facts: Facts) -> list[Facts]:
    number = facts["killed_after"] + 1
    seconds = round(max(0.0, facts["redone_s"] - facts["usual_round_s"]), 1)
    note = f"round {number} is done again after `resume=true`"
    return [row(fault, facts, number, injected=1, rounds_lost=1, seconds_lost=seconds, note=note)]


def server_app_killed(facts: Facts) -> list[Facts]:
    """Return the line of the killed ServerApp."""
    return _redone("ServerApp killed", facts)


def superlink_restarted(facts: Facts) -> list[Facts]:
    """Return the line of the restarted SuperLink."""
    return _redone("SuperLink killed and started again with its database", facts)


LINES: dict[str, Callable[[Facts], list[Facts]]] = {
    function.__name__: function
    for function in (
        bad_replies,
        frozen_and_stopped,
        killed_and_joined,
        server_app_killed,
        superlink_restarted,
    )
}


def inject(name: str, fleet: RealFleet, folder: Path) -> list[Facts]:
    """Do one scenario; if it breaks, that is its result."""
    try:
        facts = getattr(scenarios, name)(fleet, folder / name)
        lines = LINES[name](facts)
    except (TimeoutError, RuntimeError, LookupError, OSError) as error:
        lines = [{"fault": name, "survived": False, "error": f"{error!r:.300}"}]
    about = {
        "scenario": name,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "flwr": version("flwr"),
    }
    return [line | about for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(LINES), default=list(LINES))
    chosen = parser.parse_args().only
    results = HERE / "results.jsonl"
    kept = (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fleet = scenarios.start_fleet(folder / "fleet")
        try:
            for scenario in chosen:
                new = inject(scenario, fleet, folder)
                kept = [line for line in kept if line["scenario"] != scenario] + new
                kept.sort(key=lambda line: list(LINES).index(line["scenario"]))
                results.write_text("".join(json.dumps(line) + "\n" for line in kept))
        finally:
            fleet.down()


if __name__ == "__main__":
    main()

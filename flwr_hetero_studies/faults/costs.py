"""What each fault of real processes cost: a row of the table per fault."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flwr_hetero_studies.faults import outages, scenarios, storage
from flwr_hetero_studies.faults.experiment import durations

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
Found = dict[str, Any]


def row(fault: str, found: Found, number: int, *nodes: str, **more: Any) -> Found:
    """Return what a fault in a round cost; faults of one round share its seconds."""
    record, times = found["history"][number], durations(found["history"])
    failed = {failure["node"]: failure["reason"] for failure in record["failures"]}
    later = [r for r in found["history"] if r["round"] > number + 1]
    again = found.get("injected", set())
    return {
        "fault": fault,
        "round": number,
        "injected": len(nodes),
        "survived": found["survived"],
        "replies_lost": sum(node in failed for node in nodes),
        "rounds_lost": int(not record["train"]),
        "seconds_lost": round(max(0.0, times[number] - found["usual_round_s"]), 1),
        "usual_round_s": found["usual_round_s"],
        "lost_later": sum(
            f["node"] in nodes and (r["round"], f["node"]) not in again
            for r in later
            for f in r["failures"]
        ),
        "reason": next((failed[node][:80] for node in nodes if node in failed), ""),
    } | more


def bad_replies(found: Found) -> Iterator[Found]:
    """Yield a row per kind of bad reply."""
    words = [word.split(":") for word in scenarios.BAD_REPLIES.split()]
    found["injected"] = {(int(number), f"node-{partition}") for partition, number, _ in words}
    for partition, number, kind in words:
        yield row(KINDS[kind], found, int(number), f"node-{partition}")


def frozen_and_stopped(found: Found) -> Iterator[Found]:
    yield row("SuperNode frozen past the time-out of 30 s, then thawed", found, 2, "node-1")
    yield row("SuperNode stopped politely and started again", found, 2, "node-2")


def killed_and_joined(found: Found) -> Iterator[Found]:
    note = f"back online after {found['back_s']} s, {found['starts']} starts"
    yield row("SuperNode killed, started again under its key", found, 2, "node-1", note=note)
    yield row("ClientApp killed", found, 2, "node-2")
    joined = next(r["round"] for r in found["history"][1:] if "node-3" in r["selected"])
    note = f"trains from round {joined} on"
    yield row("a node joins during the run", found, joined, note=note, injected=1)


def redone(fault: str, found: Found) -> Iterator[Found]:
    number = found["killed_after"] + 1
    seconds = round(max(0.0, found["redone_s"] - found["usual_round_s"]), 1)
    note = f"round {number} is done again after `resume=true`"
    more = {"injected": 1, "rounds_lost": 1, "seconds_lost": seconds}
    yield row(fault, found, number, note=note, **more)


SCENARIOS = {
    "bad_replies": bad_replies,
    "frozen_and_stopped": frozen_and_stopped,
    "killed_and_joined": killed_and_joined,
    "server_app_killed": lambda found: redone("ServerApp killed", found),
    "superlink_restarted": lambda found: redone(
        "SuperLink killed and started again with its database", found
    ),
}


def pushing(found: Found) -> Found:
    note = f"back online after {found['back_s']} s, {found['starts']} starts"
    return row("SuperNode killed while it sends 8 MB", found, 2, "node-3", note=note)


def clocks(what: str, found: Found, *nodes: str) -> Found:
    gone = sorted({f"node-{i}" for i in range(4)} - set(found["alive"]))
    note = f"ended: {', '.join(gone)}" if gone else "no SuperNode ended"
    if found["ended_after"] < len(found["history"]) - 1:
        note += f"; the run ended after round {found['ended_after']}: `resume=true`"
    return row(f"{what} in the middle of a round", found, 2, *nodes, note=note)


def certificate(found: Found) -> Found:
    what = "SuperLink restarted with an expired certificate, then with a new one"
    (line,) = redone(what, found)
    why = "`certificate has expired`" if found["said"] else "no word of the certificate"
    return line | {"note": f"all SuperNodes ended, {why} in their logs; {line['note']}"}


def throttle(found: Found) -> Found:
    note = f"online in the end: {', '.join(found['online'])}"
    what = "throttle of `fleet up` killed, which is the relay of node-3"
    return row(what, found, 2, "node-3", note=note)


def stored(fault: str, found: Found, note: str) -> Found:
    kept = {key: found[key] for key in ("survived", "rounds_lost")}
    return {"fault": fault, "injected": 1, "replies_lost": 0, "note": note} | kept


EVERYWHERE = [f"node-{i}" for i in range(4)]
OUTAGES: dict[str, Callable[[Path], Found]] = {
    "killed_pushing": lambda f: pushing(outages.killed_pushing(f)),
    "clocks_ahead": lambda f: clocks(
        "all clocks a day ahead", outages.clock_jumps(f, 1), *EVERYWHERE
    ),
    "clocks_back": lambda f: clocks(
        "all clocks a day back", outages.clock_jumps(f, -1), *EVERYWHERE
    ),
    "clock_ahead": lambda f: clocks(
        "one node's clock a day ahead", outages.clock_jumps(f, 1, "node-1"), "node-1"
    ),
    "certificate_expires": lambda f: certificate(outages.certificate_expires(f)),
    "throttle_killed": lambda f: throttle(outages.throttle_killed(f)),
    "killed_in_checkpoint": lambda f: stored(
        "ServerApp killed in the middle of a checkpoint",
        found := storage.killed_in_checkpoint(f / "run"),
        f"{found['draft_mb']:g} MB of a draft were left; `resume=true`",
    ),
    "disk_full": lambda f: stored(
        "disk full in the middle of a checkpoint",
        found := storage.disk_full(f / "disk"),
        f"ends with exit code {found['code']}; `resume=true` once there is room",
    ),
}


def inject(name: str, folder: Path) -> list[Found]:
    """Do a fault, or several to one fleet; if that breaks, that is the result."""
    try:
        if name in OUTAGES:
            return [OUTAGES[name](folder)]
        fleet = scenarios.start_fleet(folder / "fleet")
        try:
            return list(SCENARIOS[name](getattr(scenarios, name)(fleet, folder / name)))
        finally:
            fleet.down()
    except (TimeoutError, RuntimeError, LookupError, OSError) as error:
        return [{"fault": name, "survived": False, "error": f"{error!r:.300}"}]

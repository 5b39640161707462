"""What faults cost, and what lies gain."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from flwr_hetero_studies.core import record, tables
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.faults.liars import HONEST, LIES, SCALED, SEARCHED, STRATEGIES

FAULT = ["fault", "costs with Flower's node", "with a warm node", "what the history says"]
GAIN = ["lie", "strategy", "seeds", "share", "steps", "accuracy", "honest"]
MOVED = ["lie", "strategy", "moved by one liar of 20, share", "by three"]
WORST = ["strategy", "one liar of 20 costs, points", "three cost"]
EARLY_LIE = "turned, early"
MOST_LOST = {1: 0.03, 3: 0.10}
"""What liars, by their number, may cost before a cell is bold."""


def process(lines: Sequence[Line]) -> dict[str, Any]:
    return facts(lines) | {"cores": lines[0]["metrics"]["cores"]}


def warm(lines: Sequence[Line]) -> dict[str, Any]:
    return {f"warm_{name}": found for name, found in facts(lines).items()}


def facts(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the faults by name, the usual seconds of a round, and the machine's load."""
    faults = [fault for line in lines for fault in line["metrics"]["faults"]]
    usual = sorted({fault["usual_round_s"] for fault in faults if "usual_round_s" in fault})
    loads = record.metric(lines, "load")
    parts = {"usual": f"{usual[0]:g} to {usual[-1]:g} s" if usual else "none"}
    parts |= {"low": min(loads), "high": max(loads)}
    return parts | {"faults": {fault["fault"]: fault for fault in faults}}


def side_by_side(cold: dict[str, Any], warm: dict[str, Any]) -> str:
    rows = []
    # in the order of Flower's node
    for name in cold | warm:
        cost = [costs(own[name]) if name in own else "" for own in (cold, warm)]
        (why, said), (other, warm_said) = (told(own.get(name, {})) for own in (cold, warm))
        # only one of the two lost anything
        both = name in cold and name in warm and bool(why) != bool(other)
        says = f"{said}; warm: {warm_said}" if both else said or warm_said
        rows.append([name, *cost, says.replace("|", "/")])
    return tables.table(FAULT, rows)


def told(fault: dict[str, Any]) -> tuple[str, str]:
    """Return the reason of a fault's loss, and that with its note as text."""
    reason = fault.get("error") or fault.get("reason") or ""
    return reason, "; ".join(filter(None, [reason and f"`{reason}`", fault.get("note")]))


def costs(fault: dict[str, Any]) -> str:
    """Write what a fault cost: replies at once and later, rounds, and seconds."""
    if not fault["survived"]:
        return "**run lost**"
    replies = fault.get("replies_lost", 0) + fault.get("lost_later", 0)
    counts = (replies, "reply", "replies"), (fault.get("rounds_lost", 0), "round", "rounds")
    lost = [f"{count} {one if count == 1 else many}" for count, one, many in counts if count]
    seconds = fault.get("seconds_lost")
    lost += [f"{seconds:.1f} s"] if seconds else []
    return ", ".join(lost) or "nothing"


def influence(lines: Sequence[Line]) -> dict[str, Any]:
    rows, cells, lies = [], dict[str, dict[str, str]](), list[str]()
    for (name, liars), own in record.by(lines, "name", "liars").items():
        wrapper, _, lie = name.partition(": ")
        if lie != HONEST:
            # with the same seeds
            both = record.pairs(own, record.of(lines, name=f"{wrapper}: {HONEST}"))
            honest = mean(base["metrics"]["accuracy"] for _, base in both)
            of = lie if liars == 1 else f"{lie}, six nodes"
            found = cells_of(own, lie)
            rows.append([of, wrapper, len(own), *found, tables.percent(honest)])
            lies += [of] if of not in lies else []
            mine = cells.setdefault(wrapper, {"honest": f"{100 * honest:.1f}"})
            mine[of] = found[2].removesuffix(" %") + (
                "" if found[0] == "0.000" else f", {found[0]}"
            )
    rows.sort(key=lambda row: lies.index(row[0]))
    matrix = [
        [each, *(own.get(lie, "") for lie in ("honest", *lies))] for each, own in cells.items()
    ]
    parts = {"influence": tables.table(["strategy", "honest", *lies], matrix)}
    return parts | {"influence_steps": tables.table(GAIN, rows)}


def cells_of(lines: Sequence[Line], lie: str) -> list[str]:
    """Write the liars' share or, of silent nodes, the time; the others' steps; the accuracy."""
    means = {n: mean(record.metric(lines, n)) for n in ("virtual_s", "share", "accuracy", "ended")}
    share = f"{means['virtual_s']:.0f} s" if lie == "never answers" else f"{means['share']:.3f}"
    accuracy = tables.percent(means["accuracy"]) if means["ended"] == 1 else "**run lost**"
    steps = [count for count in record.metric(lines, "steps") if count is not None]
    return [share, f"{mean(steps):.1f}" if steps else "", accuracy]


def liars(lines: Sequence[Line]) -> dict[str, Any]:
    """Tabulate accuracies with one and three liars; by itself how far the model is moved."""
    found, rows, full = record.by(lines, "name", "liars"), [], []
    for strategy in STRATEGIES:
        if (base := found.get((f"{strategy}: {HONEST}", 0))) is None:
            continue
        honest = mean(record.metric(base, "accuracy"))
        rows.append([strategy, f"{100 * honest:.1f}"])
        for lie in (lie for lie in LIES if lie != HONEST):
            among = [found[f"{strategy}: {lie}", count] for count in MOST_LOST]
            rows[-1].append(" / ".join(accuracy_of(own, honest) for own in among))
            full.append([lie, strategy, *map(moved_by, among)])
    parts = {"liars": tables.table(["strategy", *LIES], rows)}
    parts["liars_moved"] = tables.table(MOVED, full)
    parts["liars_worst"] = tables.table(WORST, worst(found))
    return parts | {"liars_seeds": len(record.seeds(lines))}


def worst(found: Mapping[tuple[str, int], list[Line]]) -> list[list[str]]:
    """Write what the worst factor of early, turned updates costs, in points."""
    rows = []
    for strategy in SEARCHED:
        honest = record.by_seed(found.get((f"{strategy}: {HONEST}", 0), []))
        row = [strategy]
        for count in MOST_LOST:
            lost = {
                lie: [
                    100
                    * (honest[line["seed"]]["metrics"]["accuracy"] - line["metrics"]["accuracy"])
                    for line in found.get((f"{strategy}: {lie}", count), [])
                ]
                for lie in (EARLY_LIE, *SCALED)
            }
            if not all(lost.values()):
                break
            lie = max(lost, key=lambda each: mean(lost[each]))
            row.append(f"{tables.extent(lost[lie], '{:.1f}')}, {lie}")
        else:
            rows.append(row)
    return rows


def accuracy_of(lines: Sequence[Line], honest: float) -> str:
    """Write the accuracy in percent, bold if far below that without liars."""
    if not all(record.metric(lines, "ended")):
        return "**run lost**"
    accuracy = mean(record.metric(lines, "accuracy"))
    far = honest - accuracy > MOST_LOST[lines[0]["case"]["liars"]]
    return f"**{100 * accuracy:.1f}**" if far else f"{100 * accuracy:.1f}"


def moved_by(lines: Sequence[Line]) -> str:
    """Write how far liars move the model, and their share of the weights."""
    shares = [share for share in record.metric(lines, "share") if share is not None]
    moved = f"{mean(record.metric(lines, 'displacement')):.2g}"
    return moved + (f", {mean(shares):.0%}" if shares else "")


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    tabulate = {"process": process, "warm": warm, "influence": influence, "liars": liars}
    for name, own in record.by(lines, "experiment").items():
        parts[f"{name}_versions"] = record.software(own, "flwr", "python")
        parts[f"{name}_case"] = own[0]["case"]
        parts |= tabulate[name](own)
    if "faults" in parts:
        parts["process"] = side_by_side(parts.pop("faults"), parts.pop("warm_faults", {}))
    return parts

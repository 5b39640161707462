"""Change a copy of a public app as README says, run it by ``flwr run``, see what it did."""

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from e2e.flower import flwr_run
from e2e.strangers.apps import METHODS, App

HERE = Path(__file__).parent
FOLDER = "FLWR_HETERO_STRANGERS"
"""Environment variable: the folder that ``fetch`` filled."""
NODES = 4
ROUNDS = 3
WORKERS = 2


@dataclass
class Outcome:
    """What a run did: examples, metrics, warnings, its score."""

    log: str
    error: str = ""
    # until the last update of the model, and after it: by nodes that were still in flight
    trained: int = 0
    in_flight: int = 0
    # of messages that report examples: those reported, and those trained
    reported: int = 0
    trained_and_reported: int = 0
    scores: list[float] = field(default_factory=list)
    metrics: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def facts(self) -> dict:
        """Return all but the log, to be written."""
        return {name: value for name, value in asdict(self).items() if name != "log"} | {
            "metrics": sorted(self.metrics)
        }


def changed(text: str, diff: str, wrapped: str) -> str:
    """Apply lines of a diff, each found by its text alone, in its order; ``{}`` is the strategy."""
    lines = text.splitlines()
    at = -1
    indent = ""
    for line in diff.strip("\n").splitlines():
        sign = line[:1]
        wanted = line[1:].strip().format(wrapped)
        if sign == "+":
            at += 1
            lines.insert(at, indent + wanted)
            continue
        places = [i for i, found in enumerate(lines) if found.strip() == wanted and i > at]
        assert places, f"no line {wanted!r}"
        at = places[0]
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        if sign == "-":
            del lines[at]
            at -= 1
    return "\n".join(lines) + "\n"


def apply(folder: Path, changes: Iterable[tuple[str, str]], wrapped: str = "strategy") -> None:
    """Change files of a copy."""
    for name, diff in changes:
        path = folder / name
        path.write_text(changed(path.read_text(encoding="utf-8"), diff, wrapped), encoding="utf-8")


def source_of(app: App) -> Path:
    return Path(os.environ[FOLDER]) / app.source.folder / app.folder


def write(app: App, method: str, folder: Path) -> None:
    """Copy an app, make it run without a hub, and put a method into the copy."""
    shutil.copytree(source_of(app), folder)
    for name, text in app.files().items():
        (folder / name).write_text(text, encoding="utf-8")
    package = folder / app.package
    apply(package, app.here.items())
    apply(package, app.everyone.items())
    start = package / "__init__.py"
    text = start.read_text(encoding="utf-8") if start.exists() else ""
    start.write_text("import strangers_kit\n" + text, encoding="utf-8")
    apply(package, app.changes_for(method), METHODS[method].wrapped)


def run(app: App, method: str, tmp: Path, timeout_s: float = 600) -> Outcome:
    """Run an app with a method in it, in a SuperLink of its own."""
    folder = tmp / "app"
    records = tmp / "records"
    records.mkdir()
    write(app, method, folder)
    paths = [str(HERE / "kit"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HOME": str(tmp / "hub"),
        "WANDB_MODE": "disabled",
        "STRANGERS_RECORDS": str(records),
        "STRANGERS_NEEDS": app.needs,
    }
    config = f"num-server-rounds={METHODS[method].rounds} {app.config}".strip()
    federation = f"num-supernodes={NODES} init-args-num-cpus={WORKERS}"
    log = flwr_run(folder, tmp / "home", config, federation, timeout_s, **variables)
    return seen(app, records, log)


def seen(app: App, records: Path, log: str) -> Outcome:
    """Put together what the processes of a run noted."""
    outcome = Outcome(log)
    notes = [
        json.loads(line)
        for path in records.glob("*.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    notes.sort(key=lambda each: each["at"])
    ends = [each["at"] for each in notes if each["kind"] == "end"]
    last_update = max((each["at"] for each in notes if each["kind"] == "update"), default=0.0)
    for each in notes:
        if each["kind"] == "warning":
            outcome.warnings.append(plain(each["text"]))
        elif each["kind"] == "failed":
            outcome.error = each["error"]
        elif each["kind"] == "end":
            for result in each["results"]:
                read(app, outcome, result)
        elif each.get("error"):
            outcome.failures.append(plain(each["error"]))
        elif each.get("type") != "train":
            continue
        elif each["at"] > last_update:
            outcome.in_flight += each["examples"]
        else:
            outcome.trained += each["examples"]
            if (reported := each["work"].get("examples-processed")) is not None:
                outcome.reported += reported
                outcome.trained_and_reported += each["examples"]
    if not ends and not outcome.error:
        outcome.error = "did not end: " + log[-2000:]
    outcome.warnings = sorted(set(outcome.warnings))
    outcome.failures = sorted(set(outcome.failures))
    return outcome


def read(app: App, outcome: Outcome, result: dict) -> None:
    """Read the metrics and scores of one ``start``."""
    place, key = app.score.split()
    for where, rounds in result.items():
        for record in rounds.values():
            outcome.metrics |= {f"{where.split('_')[0]}:{name}" for name in record}
            if where == place and key in record:
                outcome.scores.append(float(record[key]))


def plain(text: str) -> str:
    """Leave out what differs from run to run: ids and times."""
    return re.sub(r"\d{6,}", "N", text.strip())

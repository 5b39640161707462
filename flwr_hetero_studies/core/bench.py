"""Run the cases of a claim and keep one line of JSON for each; make its report from the lines.

A claim is a folder beside this file. Its ``cases.py`` says what is run (``SETTINGS``, ``plan``,
``run``), its ``report.py`` what the lines show. A run that was broken off goes on where it
stopped: lines that stand are not made again.
"""

import argparse
import json
import logging
import os
import platform
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib import import_module
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from flwr_hetero.progress import minutes
from flwr_hetero_studies.core.tables import RESULTS, Case, Line, fill, read

HERE = Path(__file__).parents[1]
CLAIMS = {path.parent.name: path.parent for path in sorted(HERE.glob("**/cases.py"))}
"""Folder of each claim, by its name."""


@dataclass(frozen=True)
class Run:
    """One run of a claim.

    ``case`` names it in the results: ``experiment``, ``name``, and all settings that matter.
    ``given`` follows from other runs (a time budget) and names nothing. A run that measures time
    or memory is ``alone``: no other one is at work beside it.
    """

    case: Case
    seed: int = 0
    given: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False

    @property
    def key(self) -> str:
        """What tells it from other runs."""
        return key_of({"case": self.case, "seed": self.seed})

    @property
    def label(self) -> str:
        """What ``--cases`` is matched with."""
        return f"{self.case['experiment']}/{self.case['name']}"


@dataclass(frozen=True)
class Data:
    """A data set as for ``dataset`` of the apps, and a folder for parts of it."""

    source: str
    scratch: str

    @property
    def name(self) -> str:
        """Last part of the path."""
        return Path(self.source).name

    def first(self, train: int, test: int) -> str:
        """Write the first rows of a Parquet folder to a folder; anything else stays whole."""
        folder = Path(self.source).expanduser()
        if not folder.is_dir():
            return self.source
        part = Path(self.scratch) / f"{self.name}-{train}-{test}"
        if not part.exists():
            new = Path(tempfile.mkdtemp(dir=self.scratch))
            for split, rows in (("train", train), ("test", test)):
                (file,) = folder.glob(f"{split}*.parquet")
                pq.write_table(pq.read_table(file).slice(0, rows), new / f"{split}.parquet")
            try:
                new.rename(part)
            except OSError:  # another process was faster
                shutil.rmtree(new)
        return str(part)


@dataclass(frozen=True)
class Options:
    """What a claim's ``plan`` is made for."""

    settings: Mapping[str, Any]
    data: str
    seeds: Sequence[int] | None = None
    fast: bool = False

    def seeds_or(self, usual: Iterable[int]) -> list[int]:
        """Return the seeds asked for, else the usual ones; one in a fast run."""
        return list(self.seeds or ([0] if self.fast else usual))


def key_of(line: Line) -> str:
    """Return what tells runs apart."""
    return json.dumps([line["case"], line["seed"]], sort_keys=True)


def _part(claim: str, name: str) -> Any:
    folder = ".".join(CLAIMS[claim].relative_to(HERE).parts) if claim in CLAIMS else claim
    return import_module(f"flwr_hetero_studies.{folder}.{name}")


def versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    found = {name: version(name) for name in ("flwr", "torch", "numpy")}
    return found | {"python": platform.python_version(), "machine": platform.machine()}


def execute(claim: str, run: Run, data: Data) -> Line:
    """Run one case in this process and return its line."""
    import torch

    cases = _part(claim, "cases")
    torch.set_num_threads(1)
    logger = logging.getLogger("flwr")
    level, start_s = logger.level, time.perf_counter()
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            found = cases.run(run.case, run.seed, data, **run.given)
    finally:
        logger.setLevel(level)
    metrics = found["metrics"] | {"took_s": round(time.perf_counter() - start_s, 1)}
    line = {"case": run.case, "seed": run.seed, "metrics": metrics}
    return line | {"curve": found.get("curve", {}), "versions": versions()}


def execute_all(claim: str, runs: list[Run], data: Data, jobs: int) -> Iterator[Line]:
    """Yield lines as they come; with 0 jobs all runs are made in this process."""
    if not jobs:
        yield from (execute(claim, run, data) for run in runs)
        return
    spawn = get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn) as pool:
        together = [pool.submit(execute, claim, run, data) for run in runs if not run.alone]
        for future in as_completed(together):
            yield future.result()
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
        for run in (run for run in runs if run.alone):
            yield pool.submit(execute, claim, run, data).result()


def run_claim(
    claim: str, options: Options, data: Data, out: Path, patterns: Sequence[str], jobs: int
) -> None:
    """Run what the claim plans and what is not there yet, until its plan has nothing new."""
    plan = _part(claim, "cases").plan
    lines = read(out)
    while todo := missing(plan(options, lines), lines, patterns):
        print(f"{len(todo)} runs to do", flush=True)
        began_s = time.perf_counter()
        for done, line in enumerate(execute_all(claim, todo, data, jobs), start=1):
            out.mkdir(parents=True, exist_ok=True)
            with (out / RESULTS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            lines.append(json.loads(json.dumps(line)))
            scalars = {k: v for k, v in line["metrics"].items() if isinstance(v, int | float)}
            shown = ", ".join(f"{k} {v:.5g}" for k, v in list(scalars.items())[:6])
            left = minutes((time.perf_counter() - began_s) / done * (len(todo) - done))
            label = f"{Run(line['case']).label}, seed {line['seed']}"
            print(f"{done:>4}/{len(todo)}  ETA {left:>7}  {label}: {shown}", flush=True)
    print(f"nothing left to do: {len(lines)} lines in {out}")


def missing(runs: Iterable[Run], lines: list[Line], patterns: Sequence[str]) -> list[Run]:
    """Return the runs that are asked for and have no line, each once."""
    done = {key_of(line) for line in lines}
    wanted = [form for pattern in patterns for form in (pattern, f"{pattern}/*")]
    found = {run.key: run for run in runs if any(fnmatch(run.label, one) for one in wanted)}
    return [run for key, run in found.items() if key not in done]


def make_report(claim: str, folder: Path) -> str:
    """Fill a claim's page by a folder's results, and draw the figures there."""
    parts = _part(claim, "report").report(read(folder), folder)
    return fill((CLAIMS[claim] / "page.md").read_text(encoding="utf-8"), parts).rstrip() + "\n"


def with_changes(settings: Mapping[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """Apply KEY=VALUE; a value has the type of the one it replaces."""
    result = dict(settings)
    for change in changes:
        key, _, value = change.partition("=")
        if key not in result:
            raise SystemExit(f"--set {key}: known are {', '.join(result)}")
        result[key] = type(result[key])(value)
    return result


def add(commands: Any) -> None:
    """Add the command ``study`` to the command line."""
    text = "run the cases of a study, or make its report"
    parser = commands.add_parser("study", help=text, description=text)
    _arguments(parser)
    parser.set_defaults(run=_run)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a study without the command."""
    parser = argparse.ArgumentParser(prog="flwr-hetero study", description=__doc__)
    _arguments(parser)
    _run(parser.parse_args(arguments))


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("claim", choices=CLAIMS)
    parser.add_argument("--data", default="digits", help="folder of train and test .parquet")
    parser.add_argument("--out", type=Path, help="folder of the results; runs/studies/CLAIM")
    parser.add_argument("--cases", nargs="+", default=[], help="patterns: EXPERIMENT or */NAME")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings")
    parser.add_argument("--jobs", type=int, help="processes; 1, and 0 with --fast: this one")
    parser.add_argument("--fast", action="store_true", help="a few small cases: does it work?")
    parser.add_argument("--report", action="store_true", help="run nothing, make the report")


def _run(args: argparse.Namespace) -> None:
    out = args.out or Path("runs", "studies", args.claim + ("-fast" if args.fast else ""))
    if args.report:
        (out / "report.md").write_text(make_report(args.claim, out), encoding="utf-8")
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cases = _part(args.claim, "cases")
    usual = cases.SETTINGS | (cases.FAST if args.fast else {})
    patterns = args.cases or (cases.FAST_CASES if args.fast else ["*"])
    jobs = args.jobs if args.jobs is not None else int(not args.fast)
    with tempfile.TemporaryDirectory() as scratch:
        data = Data(str(args.data), scratch)
        options = Options(with_changes(usual, args.set), data.name, args.seeds, args.fast)
        run_claim(args.claim, options, data, out, patterns, jobs)


if __name__ == "__main__":
    main()

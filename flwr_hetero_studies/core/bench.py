"""Run the cases of a study, keep a line of JSON for each, and write its page from the lines.

A study is a folder. Its ``cases.py`` has what is run (``SETTINGS``, ``FAST``, ``FAST_CASES``,
``plan``, ``run``), and its ``report.py`` makes the parts of the page. An interrupted run goes on
where it stopped, because existing lines are not made again.
"""

import argparse
import logging
import os
import platform
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib import import_module
from importlib.metadata import version
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from flwr_hetero.cli.parsing import add_command, end_of_help, tracked
from flwr_hetero_studies.core.plan import DIGITS, Data, NotHereError, Options, Trial
from flwr_hetero_studies.core.quiet import only_errors
from flwr_hetero_studies.core.record import Line, append, key_of, pack, read
from flwr_hetero_studies.core.tables import details, fill

HERE = Path(__file__).parents[1]
CLAIMS = {path.parent.name: path.parent for path in sorted(HERE.glob("**/cases.py"))}
"""Folders of the studies, by name."""
Write = Callable[[str, Mapping[str, Any]], str]
"""Writes a text from a template and the parts of a report."""


def _part(claim: str, name: str) -> Any:
    # Tests use modules that are no study.
    folder = ".".join(CLAIMS[claim].relative_to(HERE).parts) if claim in CLAIMS else claim
    return import_module(f"flwr_hetero_studies.{folder}.{name}")


def versions() -> dict[str, str]:
    found = {name: version(name) for name in ("flwr", "torch", "numpy")}
    return found | {"python": platform.python_version(), "machine": platform.machine()}


def execute(claim: str, trial: Trial, data: Data, threads: int | None = 1) -> Line:
    import torch

    cases = _part(claim, "cases")
    # With small models, several threads would wait for each other.
    if threads:
        torch.set_num_threads(threads)
    start_s = time.perf_counter()
    try:
        with (
            only_errors(logging.CRITICAL),
            warnings.catch_warnings(action="ignore", category=DeprecationWarning),
        ):
            found = cases.run(trial.case, trial.seed, data, **trial.given)
    except NotHereError as error:
        found = {"metrics": {"not_here": str(error)}}
    metrics = found["metrics"] | {"took_s": round(time.perf_counter() - start_s, 1)}
    line = {"case": trial.case, "seed": trial.seed, "metrics": metrics}
    return line | {"curve": found.get("curve", {}), "versions": versions()}


@contextmanager
def process_pool(jobs: int | None, **options: Any) -> Iterator[ProcessPoolExecutor]:
    """Make a pool whose processes leave Ctrl-C to this one, which ends them."""
    # A forked process would inherit torch's threads, and memory that runs may measure.
    spawn = get_context("spawn")
    ignore = (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(jobs, spawn, signal.signal, ignore, **options) as pool:
        try:
            yield pool
        except KeyboardInterrupt:
            for child in active_children():
                child.terminate()
            raise


def execute_all(claim: str, trials: list[Trial], data: Data, jobs: int) -> Iterator[Line]:
    """Yield lines in order of completion; with 0 jobs all runs are made in this process."""
    if not jobs:
        yield from (execute(claim, trial, data) for trial in trials)
        return
    with process_pool(jobs) as pool:
        together = [pool.submit(execute, claim, t, data) for t in trials if not t.alone]
        for future in as_completed(together):
            yield future.result()
    # A run that measures time or memory has its own process, so that none warms up the next.
    with process_pool(1, max_tasks_per_child=1) as pool:
        for trial in (trial for trial in trials if trial.alone):
            yield pool.submit(execute, claim, trial, data).result()


def run_claim(
    claim: str, options: Options, data: Data, out: Path, patterns: Sequence[str], jobs: int
) -> None:
    """Run what the study plans and what has no line yet, until its plan has nothing new."""
    plan = _part(claim, "cases").plan
    lines = read(out)
    # Lines of runs that this machine cannot make.
    not_here: list[Line] = []
    todo = missing(plan(options, lines), lines, patterns)
    while todo:
        print(f"{len(todo)} runs to do", flush=True)
        # Of the runs that are made alone, the next one may depend on the result of the first.
        now = [trial for trial in todo if not trial.alone] or todo[:1]
        results = tracked(execute_all(claim, now, data, jobs), claim, len(now))
        for done, line in enumerate(results, start=1):
            if "not_here" in line["metrics"]:
                not_here.append(line)
            else:
                lines.append(append(out, line))
            print(f"{done:>4}/{len(todo)}  {shown(line)}", flush=True)
        # A plan may ask for more once it sees results, such as a budget or the best rate.
        todo = missing(plan(options, lines), [*lines, *not_here], patterns)
    if lines:
        pack(out)
    print(f"nothing left to do: {len(lines)} lines in {out}")


def shown(line: Line) -> str:
    figures = [f"{k} {v:.5g}" for k, v in line["metrics"].items() if isinstance(v, int | float)]
    text = line["metrics"].get("not_here", ", ".join(figures[:6]))
    return f"{Trial(line['case']).label}, seed {line['seed']}: {text}"


def missing(trials: Iterable[Trial], lines: list[Line], patterns: Sequence[str]) -> list[Trial]:
    """Return the runs that are asked for and have no line, each once."""
    done = {key_of(line) for line in lines}
    # The pattern of an experiment includes all its names.
    wanted = [form for pattern in patterns for form in (pattern, f"{pattern}/*")]
    found = {t.key: t for t in trials if any(fnmatch(t.label, form) for form in wanted)}
    return [trial for key, trial in found.items() if key not in done]


def page_of(claim: str, lines: list[Line], folder: Path, write: Write = fill) -> str:
    """Fill a study's page and draw its figures in a folder, or write what the page leaves out."""
    parts = _part(claim, "report").report(lines, folder)
    template = (CLAIMS[claim] / "page.template").read_text(encoding="utf-8")
    return write(template, parts).rstrip() + "\n"


def with_changes(settings: Mapping[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """Apply KEY=VALUE; a value has the type of the one it replaces."""
    result = dict(settings)
    for change in changes:
        key, _, value = change.partition("=")
        if key not in result:
            raise SystemExit(f"--set {key}: known are {', '.join(result)}")
        result[key] = type(result[key])(value)
    return result


def end(*_: Any) -> None:
    """End this process and those that run trials, which may have started a fleet."""
    for child in active_children():
        child.terminate()
    raise SystemExit(128 + signal.SIGTERM)


def add(commands: Any) -> None:
    text = "run the cases of a study, or make its report"
    end = end_of_help("study race --fast", "flwr_hetero_studies/README.md")
    parser = add_command(commands, "study", _run, text, end)
    parser.add_argument("claim", choices=CLAIMS)
    parser.add_argument("--data", default=DIGITS, help="folder of train and test .parquet")
    parser.add_argument("--out", type=Path, help="folder of the results; runs/studies/CLAIM")
    parser.add_argument("--cases", nargs="+", default=[], help="patterns: EXPERIMENT or */NAME")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings")
    parser.add_argument("--jobs", type=int, help="processes; 1, and 0 with --fast: this one")
    parser.add_argument("--fast", action="store_true", help="a few small cases: does it work?")
    parser.add_argument("--report", action="store_true", help="run nothing, make the report")
    left = "run nothing, print the tables that the committed report leaves out"
    parser.add_argument("--details", action="store_true", help=left)


def _run(args: argparse.Namespace) -> None:
    out = args.out or Path("runs", "studies", args.claim + ("-fast" if args.fast else ""))
    if args.report:
        lines = read(out)
        if not lines:
            raise SystemExit(f"--out {out}: no results of the study {args.claim}")
        (out / "report.md").write_text(page_of(args.claim, lines, out), encoding="utf-8")
        return
    if args.details:
        with tempfile.TemporaryDirectory() as scratch:
            lines = read(args.out or CLAIMS[args.claim])
            print(page_of(args.claim, lines, Path(scratch), details), end="")
        return
    signal.signal(signal.SIGTERM, end)
    # The processes of the trials read this when they import NumPy.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cases = _part(args.claim, "cases")
    usual = cases.SETTINGS | (cases.FAST if args.fast else {})
    patterns = args.cases or (cases.FAST_CASES if args.fast else ["*"])
    jobs = args.jobs if args.jobs is not None else int(not args.fast)
    with tempfile.TemporaryDirectory() as scratch:
        data = Data(str(args.data), scratch)
        options = Options(with_changes(usual, args.set), data.name, args.seeds, args.fast)
        run_claim(args.claim, options, data, out, patterns, jobs)

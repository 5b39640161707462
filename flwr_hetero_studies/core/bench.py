"""Run the cases of a study and keep one line of JSON for each; make its page from the lines.

A study is a folder. Its ``cases.py`` says what is run (``SETTINGS``, ``FAST``, ``FAST_CASES``,
``plan``, ``run``), its ``report.py`` what the lines show. A run that was broken off goes on where
it stopped: lines that stand are not made again.
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
from fnmatch import fnmatch
from importlib import import_module
from importlib.metadata import version
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from flwr_hetero_studies.core.plan import DIGITS, Data, NotHereError, Options, Trial
from flwr_hetero_studies.core.record import Line, append, key_of, pack, read
from flwr_hetero_studies.core.tables import details, fill

HERE = Path(__file__).parents[1]
CLAIMS = {path.parent.name: path.parent for path in sorted(HERE.glob("**/cases.py"))}
"""Folder of each study, by its name."""
Write = Callable[[str, Mapping[str, Any]], str]
"""Makes a text of a template and the parts of a report."""


def _part(claim: str, name: str) -> Any:
    # a name that is no study is a module of a test
    folder = ".".join(CLAIMS[claim].relative_to(HERE).parts) if claim in CLAIMS else claim
    return import_module(f"flwr_hetero_studies.{folder}.{name}")


def versions() -> dict[str, str]:
    found = {name: version(name) for name in ("flwr", "torch", "numpy")}
    return found | {"python": platform.python_version(), "machine": platform.machine()}


def execute(claim: str, trial: Trial, data: Data, threads: int | None = 1) -> Line:
    import torch

    cases = _part(claim, "cases")
    # small models: more threads wait for each other
    if threads:
        torch.set_num_threads(threads)
    logger = logging.getLogger("flwr")
    level, start_s = logger.level, time.perf_counter()
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            found = cases.run(trial.case, trial.seed, data, **trial.given)
    except NotHereError as error:
        found = {"metrics": {"not_here": str(error)}}
    finally:
        logger.setLevel(level)
    metrics = found["metrics"] | {"took_s": round(time.perf_counter() - start_s, 1)}
    line = {"case": trial.case, "seed": trial.seed, "metrics": metrics}
    return line | {"curve": found.get("curve", {}), "versions": versions()}


def execute_all(claim: str, trials: list[Trial], data: Data, jobs: int) -> Iterator[Line]:
    """Yield lines as they come; with 0 jobs all runs are made in this process."""
    if not jobs:
        yield from (execute(claim, trial, data) for trial in trials)
        return
    # a forked process would inherit torch threads, and memory that memory runs count
    spawn = get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn) as pool:
        together = [pool.submit(execute, claim, each, data) for each in trials if not each.alone]
        for future in as_completed(together):
            yield future.result()
    # a process for each run that measures time or memory: none warms up the next
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
        for trial in (trial for trial in trials if trial.alone):
            yield pool.submit(execute, claim, trial, data).result()


def run_claim(
    claim: str, options: Options, data: Data, out: Path, patterns: Sequence[str], jobs: int
) -> None:
    """Run what the study plans and what is not there yet, until its plan has nothing new."""
    plan, lines, gone = _part(claim, "cases").plan, read(out), list[Line]()
    # a plan may ask for more once it sees results: a budget, the best rate
    while todo := missing(plan(options, lines), [*lines, *gone], patterns):
        print(f"{len(todo)} runs to do", flush=True)
        # by what one shows that ran alone, another may come first now
        now = [trial for trial in todo if not trial.alone] or todo[:1]
        for done, line in enumerate(execute_all(claim, now, data, jobs), start=1):
            # nothing was measured
            if "not_here" in line["metrics"]:
                gone.append(line)
            else:
                lines.append(append(out, line))
            print(f"{done:>4}/{len(todo)}  {shown(line)}", flush=True)
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
    # an experiment alone stands for all its names
    wanted = [form for pattern in patterns for form in (pattern, f"{pattern}/*")]
    found = {each.key: each for each in trials if any(fnmatch(each.label, one) for one in wanted)}
    return [trial for key, trial in found.items() if key not in done]


def page_of(claim: str, lines: list[Line], folder: Path, write: Write = fill) -> str:
    """Fill a study's page, and draw its figures in a folder; or write what it leaves out."""
    parts = _part(claim, "report").report(lines, folder)
    return (
        write((CLAIMS[claim] / "page.template").read_text(encoding="utf-8"), parts).rstrip() + "\n"
    )


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
    """End this process with those that run trials, which may have a fleet of their own."""
    for child in active_children():
        child.terminate()
    raise SystemExit(128 + signal.SIGTERM)


def add(commands: Any) -> None:
    text = "run the cases of a study, or make its report"
    parser = commands.add_parser("study", help=text, description=text)
    _arguments(parser)
    parser.set_defaults(run=_run)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="flwr-hetero study", description=__doc__)
    _arguments(parser)
    _run(parser.parse_args(arguments))


def _arguments(parser: argparse.ArgumentParser) -> None:
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
        if not (lines := read(out)):
            raise SystemExit(f"--out {out}: no results of the study {args.claim}")
        (out / "report.md").write_text(page_of(args.claim, lines, out), encoding="utf-8")
        return
    if args.details:
        with tempfile.TemporaryDirectory() as scratch:
            lines = read(args.out or CLAIMS[args.claim])
            print(page_of(args.claim, lines, Path(scratch), details), end="")
        return
    signal.signal(signal.SIGTERM, end)
    # before the processes start, which read it when they import NumPy
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

"""The command ``run``: ``flwr run`` with a checked run-config and an exit status that tells."""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from flwr_hetero.cli.doctor import add_configs
from flwr_hetero.errors import check_count
from flwr_hetero.progress import bar

RUN_ID = re.compile(r"Successfully started run (\d+)")
COMPLETED = "finished:completed"
ROUND = re.compile(r"(?:round|merge) +(\d+)/(\d+)  ")
NOISE = re.compile(
    r"Starting logstream|Since flwr 1\.32|Federation `|change federation size|simulation-config"
    r"|Successfully installed|dependencies|Created env for run|uv sync took|^\s*warnings\.warn"
    r"|FutureWarning: Tip: In future versions of Ray|Manually terminating ClientAppActor"
    r"|^(\S*INFO\s*\S*:)?\s*$"
)
"""Lines of Flower and Ray that say nothing of the run."""


def add(commands: Any) -> None:
    """Add the command to the command line."""
    text = "check an app's run-config, then flwr run --stream; exit status 1 if the run fails"
    parser = commands.add_parser("run", help=text, description=text)
    parser.add_argument("app", type=Path, metavar="APP", help="folder of an app")
    parser.add_argument("superlink", nargs="?", metavar="SUPERLINK", help="as for flwr run")
    nodes = "simulated nodes, one CPU each at a time (default: as set in Flower, 2 at first)"
    parser.add_argument("--nodes", type=int, help=nodes)
    parser.add_argument("--verbose", action="store_true", help="all lines of Flower's log")
    add_configs(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from flwr_hetero.cli.run_config import check_run_config

    federation = list(options.federation_config)
    if options.nodes is not None:
        check_count("--nodes", options.nodes, 1)
        federation.append(f"num-supernodes={options.nodes} client-resources-num-cpus=1")
    check_run_config(options.app, options.run_config, federation)
    flwr = str(Path(sys.executable).with_name("flwr"))
    where = [options.superlink] if options.superlink else []
    command = [flwr, "run", str(options.app), *where, "--stream"]
    for name, given in (("run", options.run_config), ("federation", federation)):
        command += [word for text in given for word in (f"--{name}-config", text)]
    status, run_id = _follow(command, verbose=options.verbose)
    if status or not run_id:
        return status or 1
    ask = [flwr, "ls", *where, "--run-id", run_id, "--format", "json"]
    done = subprocess.run(ask, capture_output=True, text=True, check=False)
    status = json.loads(done.stdout)["runs"][0]["status"]
    if status != COMPLETED:
        raise RuntimeError(f"run {run_id} is {status}")
    return 0


def _follow(command: list[str], *, verbose: bool) -> tuple[int, str]:
    """Print what a command prints, with a bar on a terminal; return its status and the run's id."""
    run_id, total = "", 0
    advance: Callable[[int], object] = int
    with (
        ExitStack() as bars,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process,
    ):
        for line in process.stdout or ():
            if verbose or not NOISE.search(line):
                print(line, end="", flush=True)
            if found := RUN_ID.search(line):
                run_id = found[1]
            if found := ROUND.search(line):
                if total != (total := int(found[2])):  # a baseline comes first
                    bars.close()
                    advance = bars.enter_context(bar(total))
                advance(int(found[1]))
    return process.returncode, run_id

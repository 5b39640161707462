"""The command ``run``: ``flwr run`` with a checked run-config and a reliable exit status."""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from flwr_hetero.cli.parsing import add_command, add_config, end_of_help, waiting
from flwr_hetero.errors import check_count, check_key, invalid

# Flower prints this line when it has accepted a run.
RUN_ID = re.compile(r"Successfully started run (\d+)")
COMPLETED = "finished:completed"


def add(commands: Any) -> None:
    """Add the command to the command line."""
    text = "check the run-config of an app, then flwr run --stream; fails if the run fails"
    end = end_of_help("run apps/fedslice --nodes 10 -c seed=1")
    parser = add_command(commands, "run", _run, text, end)
    parser.add_argument("app", type=Path, metavar="APP", help="folder of an app")
    parser.add_argument("superlink", nargs="?", metavar="SUPERLINK", help="as for flwr run")
    text = "simulated nodes, with one CPU each (default: as configured in Flower, 2 at first)"
    parser.add_argument("--nodes", type=int, help=text)
    add_config(parser, "run", "-c")
    add_config(parser, "federation")


def _run(options: argparse.Namespace) -> int:
    federation_config = list(options.federation_config)
    if options.nodes is not None:
        check_count("--nodes", options.nodes, 1)
        federation_config.append(f"num-supernodes={options.nodes} client-resources-num-cpus=1")
    with waiting(f"Checking {options.app}"):
        check_run_config(options.app, options.run_config)
    flwr = str(Path(sys.executable).with_name("flwr"))
    superlink = [options.superlink] if options.superlink else []
    command = [flwr, "run", str(options.app), *superlink, "--stream"]
    for text in options.run_config:
        command += ["--run-config", text]
    for text in federation_config:
        command += ["--federation-config", text]
    exit_status, run_id = _follow(command)
    if exit_status or not run_id:
        return exit_status or 1
    # flwr run --stream exits with 0 even if the run has failed.
    command = [flwr, "ls", *superlink, "--run-id", run_id, "--format", "json"]
    listing = subprocess.run(command, capture_output=True, text=True, check=False)
    status = json.loads(listing.stdout)["runs"][0]["status"]
    if status != COMPLETED:
        raise RuntimeError(f"run {run_id} is {status}")
    return 0


def _follow(command: list[str]) -> tuple[int, str]:
    """Print what a command prints; return its exit status and the id of the run."""
    run_id = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            match = RUN_ID.search(line)
            if match:
                run_id = match[1]
    return process.returncode, run_id


# -- the run-config of an app, checked here because Flower answers a mistyped key with a code --


def check_run_config(app: Path, given: Sequence[str]) -> dict[str, Any]:
    """Return the run-config that Flower would give to the app; refuse unknown keys and bad values.

    The app's own rules check the values: a class with ``from_run_config`` that the module of its
    ServerApp defines or imports.
    """
    from flwr_hetero._flwr import app_tables, parse_run_config

    components, defaults = app_tables(app)
    changed = parse_run_config(given)
    for key in changed:
        check_key("run-config", key, defaults)
    config = {**defaults, **changed}
    rules = _rules(app, components["serverapp"].partition(":")[0])
    if rules:
        rules.from_run_config(config)
    return config


def _rules(app: Path, module: str) -> Any:
    """Return the class that checks an app's run-config, the most derived of several, or None."""
    sys.path.insert(0, str(app.resolve()))
    try:
        values = vars(import_module(module)).values()
    except ImportError as error:
        raise invalid("app", str(app), f"be importable ({module}: {error})") from error
    finally:
        sys.path.pop(0)
    rules = [value for value in values if isinstance(value, type)]
    rules = [rule for rule in rules if hasattr(rule, "from_run_config")]
    return max(rules, key=lambda rule: len(rule.__mro__), default=None)

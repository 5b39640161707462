"""The command ``run``: ``flwr run`` with a checked run-config and an exit status that tells."""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from flwr_hetero.errors import check_count, check_key, invalid

RUN_ID = re.compile(r"Successfully started run (\d+)")
COMPLETED = "finished:completed"


def add(commands: Any) -> None:
    """Add the command to the command line."""
    text = "check an app's run-config, then flwr run --stream; exit status 1 if the run fails"
    parser = add_command(commands, "run", _run, text)
    parser.add_argument("app", type=Path, metavar="APP", help="folder of an app")
    parser.add_argument("superlink", nargs="?", metavar="SUPERLINK", help="as for flwr run")
    nodes = "simulated nodes, one CPU each at a time (default: as set in Flower, 2 at first)"
    parser.add_argument("--nodes", type=int, help=nodes)
    add_config(parser, "run", "-c")
    add_config(parser, "federation")


def add_command(above: Any, name: str, run: Callable[..., Any], text: str, more: str = "") -> Any:
    """Add a command that calls a function; return its parser."""
    parser = above.add_parser(name, help=text, description=text + more)
    parser.set_defaults(run=run)
    return parser


def add_config(parser: argparse.ArgumentParser, name: str, *short: str) -> None:
    """Add an option that ``flwr run`` has for an app's or a simulation's settings."""
    text = "as for flwr run: KEY=VALUE ..., texts in quotes; may be given several times"
    names = (f"--{name}-config", *short)
    parser.add_argument(*names, action="append", default=[], metavar="KEYS", help=text)


def _run(options: argparse.Namespace) -> int:
    federation = list(options.federation_config)
    if options.nodes is not None:
        check_count("--nodes", options.nodes, 1)
        federation.append(f"num-supernodes={options.nodes} client-resources-num-cpus=1")
    check_run_config(options.app, options.run_config)
    flwr = str(Path(sys.executable).with_name("flwr"))
    where = [options.superlink] if options.superlink else []
    command = [flwr, "run", str(options.app), *where, "--stream"]
    for name, given in (("run", options.run_config), ("federation", federation)):
        command += [word for text in given for word in (f"--{name}-config", text)]
    status, run_id = _follow(command)
    if status or not run_id:
        return status or 1
    ask = [flwr, "ls", *where, "--run-id", run_id, "--format", "json"]
    done = subprocess.run(ask, capture_output=True, text=True, check=False)
    status = json.loads(done.stdout)["runs"][0]["status"]
    if status != COMPLETED:
        raise RuntimeError(f"run {run_id} is {status}")
    return 0


def _follow(command: list[str]) -> tuple[int, str]:
    """Print what a command prints; return its status and the run's id."""
    run_id = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if found := RUN_ID.search(line):
                run_id = found[1]
    return process.returncode, run_id


# -- an app's run-config, checked before Flower sees it, which answers a mistyped key by a code --


def check_run_config(app: Path, given: Sequence[str]) -> dict[str, Any]:
    """Return the run-config that Flower would give the app; refuse keys and values it would not.

    Values are checked by the app's own rules: a class with ``from_run_config`` that its ServerApp's
    module has or imports.
    """
    from flwr_hetero._flwr import app_tables, parse_run_config

    components, defaults = app_tables(app)
    changed = parse_run_config(given)
    for key in changed:
        check_key("run-config", key, defaults)
    config = {**defaults, **changed}
    if rules := _rules(app, components["serverapp"].partition(":")[0]):
        rules.from_run_config(config)
    return config


def _rules(app: Path, module: str) -> Any:
    """Find the class that checks an app's run-config, the most derived of several; None if none."""
    sys.path.insert(0, str(app.resolve()))
    try:
        found = vars(import_module(module)).values()
    except ImportError as error:
        raise invalid("app", str(app), f"be importable ({module}: {error})") from error
    finally:
        sys.path.pop(0)
    rules = [each for each in found if isinstance(each, type) and hasattr(each, "from_run_config")]
    return max(rules, key=lambda each: len(each.__mro__), default=None)

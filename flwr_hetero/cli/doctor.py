"""The command ``doctor``: what is wrong with an installation or an app's run-config."""

import argparse
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from flwr_hetero import __version__
from flwr_hetero.cli.run import add_config, check_run_config
from flwr_hetero.errors import install_hint

OK, NOTE, FAIL = "ok", "note", "FAIL"
# Extra of the package, what it is for, and packages of it.
EXTRAS = {
    "node": ("training", "torch torchvision"),
    "report": ("run directories", "filelock jinja2 plotly rich safetensors"),
    "task": ("the apps", "datasets flwr_datasets sklearn PIL pyarrow"),
    "simulation": ("simulation", "ray"),
}

Finding: TypeAlias = tuple[str, str]


def add(commands: Any) -> None:
    """Add the command to the command line."""
    text = "check the installation and an app's run-config"
    parser = commands.add_parser("doctor", help=text, description=text)
    parser.add_argument("app", nargs="?", type=Path, metavar="APP", help="folder of an app")
    add_config(parser, "run", "-c")
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    states = set()
    for state, text in _findings(options):
        states.add(state)
        print(f"{state:<5} {text}", flush=True)
    return int(FAIL in states)


def _findings(options: argparse.Namespace) -> Iterator[Finding]:
    yield from installation()
    if app := options.app:
        try:
            keys = check_run_config(app, options.run_config)
            yield OK, f"run-config of {app}: {len(keys)} keys"
        except ValueError as error:
            yield FAIL, f"run-config of {app}: {error}"


def installation() -> Iterator[Finding]:
    """Check versions, and what each extra of the package needs."""
    from flwr_hetero._flwr import TRIED_WITH

    yield OK, f"flwr-hetero {__version__}, Python {platform.python_version()}, {sys.prefix}"
    flwr = metadata.version("flwr")
    tried = flwr == TRIED_WITH
    yield OK if tried else NOTE, f"flwr {flwr}" + ("" if tried else f", tried with {TRIED_WITH}")
    for extra, (what, packages) in EXTRAS.items():
        if missing := [name for name in packages.split() if find_spec(name) is None]:
            yield NOTE, f"for {what} {', '.join(missing)} are missing: {install_hint(extra)}"
        else:
            yield OK, f"extra {extra}, for {what}"

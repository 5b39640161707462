"""The command ``doctor``: what is wrong with an installation or an app's run-config."""

import argparse
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flwr_hetero import __version__
from flwr_hetero.cli.run import add_command, add_config, check_run_config
from flwr_hetero.errors import install_hint

# Extra of the package, what it is for, and packages of it.
EXTRAS = {
    "node": ("training", "torch torchvision"),
    "report": ("run directories", "filelock jinja2 plotly rich safetensors"),
    "task": ("the apps", "datasets flwr_datasets sklearn PIL pyarrow"),
    "simulation": ("simulation", "ray"),
}

# Distributions that are not called as they are imported.
DISTRIBUTIONS = {"PIL": "pillow", "flwr_datasets": "flwr-datasets", "sklearn": "scikit-learn"}


def hint_for(package: str) -> str:
    """Say how to install a package, by itself or with its extra."""
    extra = next((name for name, (_, own) in EXTRAS.items() if package in own.split()), "all")
    return install_hint(extra, DISTRIBUTIONS.get(package, package))


def add(commands: Any) -> None:
    """Add the command to the command line."""
    text = "check the installation and an app's run-config"
    parser = add_command(commands, "doctor", _doctor, text)
    parser.add_argument("app", nargs="?", type=Path, metavar="APP", help="folder of an app")
    add_config(parser, "run", "-c")


def _doctor(options: argparse.Namespace) -> int:
    for line in installation():
        print(line)
    if options.app:
        # an error is one line, and the exit status 2
        keys = check_run_config(options.app, options.run_config)
        print(f"ok    run-config of {options.app}: {len(keys)} keys")
    return 0


def installation() -> Iterator[str]:
    """Check versions, and what each extra of the package needs."""
    from flwr_hetero._flwr import TRIED_WITH

    yield f"ok    flwr-hetero {__version__}, Python {platform.python_version()}, {sys.prefix}"
    flwr = metadata.version("flwr")
    yield f"ok    flwr {flwr}" if flwr == TRIED_WITH else f"note  flwr {flwr}, not {TRIED_WITH}"
    for extra, (what, packages) in EXTRAS.items():
        if missing := [name for name in packages.split() if find_spec(name) is None]:
            yield f"note  for {what} {', '.join(missing)} are missing: {install_hint(extra)}"
        else:
            yield f"ok    extra {extra}, for {what}"

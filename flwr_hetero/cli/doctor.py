"""The command ``doctor``: what is wrong with an installation or an app's run-config."""

import argparse
import platform
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flwr_hetero import __version__
from flwr_hetero.cli.run import add_command, add_config, check_run_config
from flwr_hetero.errors import install_hint

# By extra of the package: what it is for, and the packages that it needs.
EXTRAS = {
    "node": ("training", ("torch", "torchvision")),
    "report": ("run directories", ("filelock", "jinja2", "plotly", "safetensors")),
    "task": ("the apps", ("datasets", "flwr_datasets", "sklearn", "PIL", "pyarrow")),
    "simulation": ("simulation", ("ray",)),
}
# Distributions that have another name than the package that they install.
DISTRIBUTIONS = {"PIL": "pillow", "flwr_datasets": "flwr-datasets", "sklearn": "scikit-learn"}


def hint_for(package: str) -> str:
    """Say how to install a package, by itself or with its extra."""
    extras = [extra for extra, (_, packages) in EXTRAS.items() if package in packages]
    return install_hint(extras[0] if extras else "all", DISTRIBUTIONS.get(package, package))


def add(commands: Any) -> None:
    """Add the command to the command line."""
    text = "check the installation, and the run-config of an app"
    parser = add_command(commands, "doctor", _doctor, text)
    parser.add_argument("app", nargs="?", type=Path, metavar="APP", help="folder of an app")
    add_config(parser, "run", "-c")


def _doctor(options: argparse.Namespace) -> None:
    for line in installation():
        print(line)
    if options.app:
        keys = check_run_config(options.app, options.run_config)
        print(f"ok    run-config of {options.app}: {len(keys)} keys")


def installation() -> Iterator[str]:
    """Check versions, and what each extra of the package needs."""
    from flwr_hetero._flwr import TRIED_WITH, VERSION

    yield f"ok    flwr-hetero {__version__}, Python {platform.python_version()}, {sys.prefix}"
    if VERSION == TRIED_WITH:
        yield f"ok    flwr {VERSION}"
    else:
        yield f"note  flwr {VERSION}, tested with {TRIED_WITH}"
    for extra, (purpose, packages) in EXTRAS.items():
        missing = [package for package in packages if find_spec(package) is None]
        if missing:
            yield f"note  {purpose} needs {', '.join(missing)}: {install_hint(extra)}"
        else:
            yield f"ok    extra {extra}, for {purpose}"

"""The command ``doctor``: what is wrong with an installation or an app's run-config."""

import argparse
import ast
import platform
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flwr_hetero import __version__
from flwr_hetero.cli.parsing import add_command, add_config, end_of_help
from flwr_hetero.cli.run import check_run_config
from flwr_hetero.errors import install_hint, invalid

# By extra of the package: what it is for, and the packages that it needs.
EXTRAS = {
    "node": ("training", ("torch", "torchvision")),
    "report": ("run directories", ("filelock", "jinja2", "plotly", "safetensors")),
    "task": ("the apps", ("datasets", "flwr_datasets", "sklearn", "PIL", "pyarrow")),
    "simulation": ("simulation", ("ray",)),
}
# What the code of a ClientApp has, unless it handles the messages by itself, and the remedy.
CLIENT_LINES = {
    r"^(?!\s*(from|import)\b).*\bhetero\b(?!\.)|flwr_hetero import keys": "has no mod of this "
    "package: from flwr_hetero.mod import hetero, and then app = ClientApp(mods=[hetero])",
    r"\b(batches|num_steps|StepLoader)\(|flwr_hetero import keys": "does not take the steps that "
    "FedSlice and others ask for: loader = hetero.batches(loader, msg) before the training loop",
}
CLIENT_PAGE = "docs/dropin.md"
# Distributions that have another name than the package that they install.
DISTRIBUTIONS = {"PIL": "pillow", "flwr_datasets": "flwr-datasets", "sklearn": "scikit-learn"}


def hint_for(package: str) -> str:
    """Say how to install a package, by itself or with its extra."""
    extras = [extra for extra, (_, packages) in EXTRAS.items() if package in packages]
    return install_hint(extras[0] if extras else "all", DISTRIBUTIONS.get(package, package))


def add(commands: Any) -> None:
    """Add the command to the command line."""
    text = "check the installation, and the run-config and the ClientApp of an app"
    end = end_of_help("doctor apps/fedslice -c seed=1", CLIENT_PAGE)
    parser = add_command(commands, "doctor", _doctor, text, end)
    parser.add_argument("app", nargs="?", type=Path, metavar="APP", help="folder of an app")
    add_config(parser, "run", "-c")


def _doctor(options: argparse.Namespace) -> None:
    for line in installation():
        print(line)
    if options.app:
        from flwr_hetero._flwr import app_tables

        keys = check_run_config(options.app, options.run_config)
        print(f"ok    run-config of {options.app}: {len(keys)} keys")
        components, _ = app_tables(options.app)
        print("\n".join(client_side(options.app, components.get("clientapp", ""))))


def client_side(app: Path, component: str) -> Iterator[str]:
    """Look for the lines of this package in the ClientApp's package, without importing it."""
    package = component.partition(":")[0].partition(".")[0]
    code = ""
    for path in sorted({*(app / package).rglob("*.py"), *app.glob(f"{package}.py")}):
        try:
            # Python writes each statement on a line of its own, without comments.
            code += ast.unparse(ast.parse(path.read_text(encoding="utf-8"))) + "\n"
        except (SyntaxError, ValueError) as error:
            raise invalid("app", str(app), f"have readable modules ({path}: {error})") from error
    missing = [text for line, text in CLIENT_LINES.items() if not re.search(line, code, re.M)]
    for text in missing:
        yield f"note  the ClientApp of {app} {text} ({CLIENT_PAGE})"
    if not missing:
        yield f"ok    the ClientApp of {app} has the lines of this package"


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

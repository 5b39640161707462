"""The command ``doctor``: what is wrong with an installation or an app's run-config."""

import argparse
import ast
import platform
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flwr_hetero import __version__
from flwr_hetero.cli.parsing import add_command, add_config
from flwr_hetero.cli.run import check_run_config
from flwr_hetero.errors import install_hint, invalid

# By extra of the package: what it is for, and the packages that it needs.
EXTRAS = {
    "node": ("training", ("torch", "torchvision")),
    "report": ("run directories", ("filelock", "jinja2", "plotly", "safetensors")),
    "task": ("the apps", ("datasets", "flwr_datasets", "sklearn", "PIL", "pyarrow")),
    "simulation": ("simulation", ("ray",)),
}
# Names of which a ClientApp uses one, unless it reads and writes the messages by itself.
MOD = {"hetero", "Hetero", "flwr_hetero.keys"}
STEPS = {"batches", "num_steps", "StepLoader", "flwr_hetero.keys"}
NO_MOD = (
    "has no mod of this package: from flwr_hetero.mod import hetero, and then "
    "app = ClientApp(mods=[hetero])"
)
NO_STEPS = (
    "does not take the steps that FedSlice and others ask for: loader = "
    "hetero.batches(loader, msg) before the training loop"
)
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
    parser = add_command(commands, "doctor", _doctor, text, "apps/fedslice", CLIENT_PAGE)
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
        for line in client_side(options.app, components.get("clientapp", "")):
            print(line)


def client_side(app: Path, component: str) -> Iterator[str]:
    """Look for the lines of this package in the ClientApp's package, without importing it."""
    package = component.partition(":")[0].partition(".")[0]
    nodes: list[ast.AST] = []
    for path in sorted({*(app / package).rglob("*.py"), *app.glob(f"{package}.py")}):
        try:
            nodes += ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        except (SyntaxError, ValueError) as error:
            raise invalid("app", str(app), f"have readable modules ({path}: {error})") from error
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    # `hetero` is a mod where it stands alone. In `hetero.batches` it is not one.
    owners = {node.value for node in attributes}
    names = [node for node in nodes if isinstance(node, ast.Name) and node not in owners]
    used = {node.attr for node in attributes if node not in owners} | {node.id for node in names}
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    used |= {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    missing = [text for wanted, text in ((MOD, NO_MOD), (STEPS, NO_STEPS)) if not used & wanted]
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

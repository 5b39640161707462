"""Commands on apps: ``doctor`` finds what is wrong with one, ``run`` runs it."""

import argparse
import ast
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flwr_hetero import __version__
from flwr_hetero.cli.parsing import add_command, end_of_help
from flwr_hetero.errors import check_count, check_key, install_hint, invalid

# By extra of the package: what it is for, and the packages that it needs.
EXTRAS = {
    "node": ("training", ("torch", "torchvision")),
    "report": ("run directories", ("filelock", "jinja2", "plotly", "safetensors")),
    "task": ("the apps", ("datasets", "flwr_datasets", "sklearn", "PIL", "pyarrow")),
    "simulation": ("simulation", ("ray",)),
}
# Distributions that have another name than the package that they install.
DISTRIBUTIONS = {"PIL": "pillow", "flwr_datasets": "flwr-datasets", "sklearn": "scikit-learn"}
# What the code of a ClientApp has, unless it handles the messages by itself, and the remedy.
CLIENT_LINES = {
    r"^(?!\s*(from|import)\b).*\bhetero\b(?!\.)|flwr_hetero import keys": "has no mod of this "
    "package: from flwr_hetero.mod import hetero, and then app = ClientApp(mods=[hetero])",
    r"\b(batches|num_steps|StepLoader)\(|flwr_hetero import keys": "does not take the steps that "
    "FedSlice and others ask for: loader = hetero.batches(loader, msg) before the training loop",
}
CLIENT_PAGE = "docs/dropin.md"
# Flower prints this line when it has accepted a run.
RUN_ID = re.compile(r"Successfully started run (\d+)")
COMPLETED = "finished:completed"


def add(commands: Any) -> None:
    """Add the commands to the command line."""
    text = "check the installation, and the run-config and the ClientApp of an app"
    end = end_of_help("doctor apps/fedslice -c seed=1", CLIENT_PAGE)
    doctor = add_command(commands, "doctor", _doctor, text, end)
    doctor.add_argument("app", nargs="?", type=Path, metavar="APP", help="folder of an app")

    text = "check the run-config of an app, then flwr run --stream; fails if the run fails"
    end = end_of_help("run apps/fedslice --nodes 10 -c seed=1")
    run = add_command(commands, "run", _run, text, end)
    run.add_argument("app", type=Path, metavar="APP", help="folder of an app")
    run.add_argument("superlink", nargs="?", metavar="SUPERLINK", help="as for flwr run")
    text = "simulated nodes, with one CPU each (default: as configured in Flower, 2 at first)"
    run.add_argument("--nodes", type=int, help=text)

    text = "as for flwr run: KEY=VALUE ..., with texts in quotes; may be given several times"
    keys: dict[str, Any] = {"action": "append", "default": [], "metavar": "KEYS", "help": text}
    for parser in (doctor, run):
        parser.add_argument("--run-config", "-c", **keys)
    run.add_argument("--federation-config", **keys)


def hint_for(package: str) -> str:
    """Say how to install a package, by itself or with its extra."""
    extras = [extra for extra, (_, packages) in EXTRAS.items() if package in packages]
    return install_hint(extras[0] if extras else "all", DISTRIBUTIONS.get(package, package))


def _doctor(options: argparse.Namespace) -> None:
    for line in _installation():
        print(line)
    if options.app:
        keys = check_run_config(options.app, options.run_config)
        print(f"ok    run-config of {options.app}: {len(keys)} keys")
        for line in client_side(options.app):
            print(line)


def _installation() -> Iterator[str]:
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


def client_side(app: Path) -> Iterator[str]:
    """Look for the lines of this package in the ClientApp's package, without importing it."""
    from flwr_hetero._flwr import app_tables

    components, _ = app_tables(app)
    package = re.split("[.:]", components.get("clientapp", ""))[0]
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


def check_run_config(app: Path, given: Sequence[str]) -> dict[str, Any]:
    """Return the run-config that Flower would give to the app; refuse unknown keys and bad values.

    The app's own rules check the values: the class with ``from_run_config`` that the module of its
    ServerApp defines or imports, the most derived of several.
    """
    from flwr_hetero._flwr import app_tables, parse_run_config

    components, defaults = app_tables(app)
    changed = parse_run_config(given)
    # Flower answers a mistyped key with a code.
    for key in changed:
        check_key("run-config", key, defaults)
    config = {**defaults, **changed}
    module = components["serverapp"].partition(":")[0]
    sys.path.insert(0, str(app.resolve()))
    try:
        values = vars(import_module(module)).values()
    except ImportError as error:
        raise invalid("app", str(app), f"be importable ({module}: {error})") from error
    finally:
        sys.path.pop(0)
    rules: list[Any] = [value for value in values if isinstance(value, type)]
    rules = [rule for rule in rules if hasattr(rule, "from_run_config")]
    if rules:
        max(rules, key=lambda rule: len(rule.__mro__)).from_run_config(config)
    return config


def _run(options: argparse.Namespace) -> int:
    federation_config = [*options.federation_config]
    if options.nodes is not None:
        check_count("--nodes", options.nodes, 1)
        federation_config.append(f"num-supernodes={options.nodes} client-resources-num-cpus=1")
    check_run_config(options.app, options.run_config)
    flwr = str(Path(sys.executable).with_name("flwr"))
    superlink = [options.superlink] if options.superlink else []
    command = [flwr, "run", str(options.app), *superlink, "--stream"]
    for text in options.run_config:
        command += ["--run-config", text]
    for text in federation_config:
        command += ["--federation-config", text]
    started = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            started = RUN_ID.search(line) or started
    if process.returncode or not started:
        return process.returncode or 1
    # flwr run --stream exits with 0 even if the run has failed.
    command = [flwr, "ls", *superlink, "--run-id", started[1], "--format", "json"]
    listing = subprocess.run(command, capture_output=True, text=True, check=False)
    status = json.loads(listing.stdout)["runs"][0]["status"]
    if status != COMPLETED:
        raise RuntimeError(f"run {started[1]} is {status}")
    return 0

"""The command ``doctor``: what is wrong with an installation, a SuperLink or a run-config."""

import argparse
import platform
import socket
import ssl
import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

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
# Seconds that a SuperLink may take to answer; its port if none is given.
DIAL_S, HTTPS = 5.0, 443
# Address by which Flower starts a SuperLink of its own, for simulation.
LOCAL = ":local:"

Finding: TypeAlias = tuple[str, str]


def add(commands: Any) -> None:
    """Add the command to the command line."""
    text = "check the installation, a SuperLink and an app's run-config"
    parser = commands.add_parser("doctor", help=text, description=text)
    parser.add_argument("app", nargs="?", type=Path, metavar="APP", help="folder of an app")
    text = "connection in Flower's config.toml to try"
    parser.add_argument("--superlink", metavar="NAME", help=text)
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
    yield from gpus()
    if options.superlink:
        yield from superlink(options.superlink)
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


def gpus() -> Iterator[Finding]:
    """Check that torch can be imported, and whether it sees a GPU."""
    try:
        cuda = import_module("torch").cuda
    except ModuleNotFoundError:
        # Already a finding of its extra.
        return
    except (ImportError, OSError) as error:
        yield FAIL, f"torch cannot be imported: {error}"
        return
    names = map(cuda.get_device_name, range(cuda.device_count()))
    yield OK, f"GPUs that torch sees: {', '.join(names) or 'none'}"


def superlink(name: str) -> Iterator[Finding]:
    """Check that a SuperLink can be reached, and is the one it claims to be."""
    from flwr_hetero._flwr import superlink_connection

    connection = superlink_connection(name)
    address = str(connection.get("address", ""))
    if address == LOCAL:
        yield OK, f"superlink {name}: simulation on this machine"
        return
    try:
        _dial(address, connection)
    except (OSError, ValueError) as error:
        hint = ": see root-certificates" if isinstance(error, ssl.SSLError) else ""
        yield FAIL, f"superlink {name}: {address}: {error}{hint}"
    else:
        nodes = f"its nodes: flwr supernode list {name}"
        yield OK, f"superlink {name}: {address} answers; {nodes}"


def _dial(address: str, connection: dict[str, Any]) -> None:
    url = urlsplit("//" + address.rpartition("//")[2])
    host = url.hostname or ""
    with socket.create_connection((host, url.port or HTTPS), DIAL_S) as plain:
        if not connection.get("insecure"):
            context = ssl.create_default_context(cafile=connection.get("root-certificates"))
            context.wrap_socket(plain, server_hostname=host).close()

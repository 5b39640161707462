"""The command ``doctor``: what is wrong with an installation, a SuperLink or a run-config."""

import argparse
import json
import platform
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from flwr_hetero import __version__
from flwr_hetero.cli.run import add_configs, check_run_config
from flwr_hetero.errors import install_hint

OK, NOTE, FAIL = "ok", "note", "FAIL"
# Extra of the package, and what needs it.
EXTRAS = {"node": "training", "report": "run directories", "task": "the apps", "simulation": "Ray"}
# Seconds that a SuperLink may take to answer; its port if none is given.
DIAL_S, HTTPS = 5.0, 443
# Address by which Flower starts a SuperLink of its own, for simulation.
LOCAL = ":local:"
# Key of the federation-config: share of a GPU for each simulated node.
NUM_GPUS = "client-resources-num-gpus"

Finding: TypeAlias = tuple[str, str]


def add(commands: Any) -> None:
    """Add the command to the command line."""
    text = "check the installation, a SuperLink and an app's run-config"
    parser = commands.add_parser("doctor", help=text, description=text)
    parser.add_argument("app", nargs="?", type=Path, metavar="APP", help="folder of an app")
    text = "connection in Flower's config.toml to try"
    parser.add_argument("--superlink", metavar="NAME", help=text)
    add_configs(parser)
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    states = set()
    for state, text in _findings(options):
        states.add(state)
        print(f"{state:<5} {text}", flush=True)
    return int(FAIL in states)


def _findings(options: argparse.Namespace) -> Iterator[Finding]:
    yield from installation()
    yield from gpus(options.federation_config)
    if options.superlink:
        yield from superlink(options.superlink)
    if app := options.app:
        try:
            keys = check_run_config(app, options.run_config, options.federation_config)
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
    for extra, what in EXTRAS.items():
        if wanting := sorted(set(missing("flwr-hetero", extra))):
            hint = install_hint(extra)
            yield NOTE, f"{what} need{'s' * (extra != 'task')} {', '.join(wanting)}: {hint}"
        else:
            yield OK, f"extra {extra}, for {what}"


def missing(name: str, extra: str) -> Iterator[str]:
    """Name the requirements of a distribution's extra that are not installed, or too old."""
    from packaging.requirements import Requirement

    for need in map(Requirement, metadata.requires(name) or ()):
        asked = [bool(need.marker and need.marker.evaluate({"extra": e})) for e in ("", extra)]
        if asked != [False, True]:  # not of this extra alone
            continue
        try:
            found = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            yield str(need).partition(";")[0].strip()
            continue
        if not need.specifier.contains(found, prereleases=True):
            yield f"{need.name}{need.specifier} (there is {found})"
        for inner in need.extras:
            yield from missing(need.name, inner)


def gpus(federation_config: list[str]) -> Iterator[Finding]:
    """Check that torch can be imported, and whether simulated nodes would see a GPU."""
    from flwr_hetero._flwr import parse_run_config

    try:
        cuda = import_module("torch").cuda
    except ModuleNotFoundError:
        return  # said by the extra
    except (ImportError, OSError) as error:
        yield FAIL, f"torch cannot be imported: {error}"
        return
    if not cuda.is_available():
        yield NOTE, "torch sees no GPU: nodes train on the CPU"
        return
    yield OK, f"GPUs: {', '.join(map(cuda.get_device_name, range(cuda.device_count())))}"
    if not parse_run_config(federation_config).get(NUM_GPUS):
        yield NOTE, f'simulated nodes see none without --federation-config "{NUM_GPUS}=0.1"'


def superlink(name: str) -> Iterator[Finding]:
    """Check that a SuperLink can be reached, is the one it claims to be, and has nodes."""
    from flwr_hetero._flwr import superlink_connection

    connection = superlink_connection(name)
    address = str(connection.get("address", ""))
    if address == LOCAL:
        yield OK, f"superlink {name}: simulation on this machine"
        return
    try:
        _dial(address, connection)
    except ssl.SSLError as error:
        text = getattr(error, "verify_message", "") or error.reason
        yield FAIL, f"superlink {name}: TLS with {address}: {text}: see root-certificates"
    except (OSError, ValueError) as error:
        yield FAIL, f"superlink {name}: {address}: {error}"
    else:
        yield OK, f"superlink {name}: {address} answers"
        yield _nodes(name)


def _dial(address: str, connection: dict[str, Any]) -> None:
    url = urlsplit("//" + address.rpartition("//")[2])
    host = url.hostname or ""
    with socket.create_connection((host, url.port or HTTPS), DIAL_S) as plain:
        if not connection.get("insecure"):
            context = ssl.create_default_context(cafile=connection.get("root-certificates"))
            context.wrap_socket(plain, server_hostname=host).close()


def _nodes(name: str) -> Finding:
    """Ask the SuperLink which SuperNodes are online."""
    flwr = Path(sys.executable).with_name("flwr")
    command = [str(flwr), "supernode", "list", name, "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    try:
        listed = json.loads(done.stdout)["nodes"]
    except (ValueError, KeyError):
        last = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["no answer"]
        return FAIL, f"superlink {name}: its SuperNodes cannot be listed: {last[0]}"
    online = sum(node["status"] == "online" for node in listed)
    return OK if online else FAIL, f"{online} of {len(listed)} registered SuperNodes are online"

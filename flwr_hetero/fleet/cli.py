"""The command line of real fleets: up, status, down, certificates."""

import argparse
import sys
from collections.abc import Sequence
from math import isinf
from pathlib import Path

from flwr_hetero.client.device import named_fleet
from flwr_hetero.fleet import certificates
from flwr_hetero.fleet.fleet_file import Node
from flwr_hetero.fleet.real_fleet import RealFleet

DEFAULT_FOLDER = "~/flwr-hetero-fleet"


PROGRAM = "python -m flwr_hetero.fleet"


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Run a command; what goes wrong is one line on the error stream."""
    options = _parser(program).parse_args(arguments)
    try:
        options.do(options)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        program, description="A real fleet on this machine, and keys for one elsewhere."
    )
    kinds = parser.add_subparsers(required=True, metavar="COMMAND")
    up = kinds.add_parser(
        "up",
        help="start a SuperLink and SuperNodes with TLS and keys",
        description="Start a SuperLink and SuperNodes with TLS and keys. While they are up, EVERY "
        "USER OF THIS MACHINE CAN RUN CODE AS YOU: Flower's SuperLink asks for no credentials on "
        "127.0.0.1.",
    )
    up.add_argument("--nodes", type=int, default=4, help="SuperNodes (default: 4)")
    up.add_argument(
        "--fleet",
        default="uniform",
        help="uniform, paper-5 or a TOML file of devices: speeds become shares of one CPU",
    )
    up.add_argument(
        "--cpu", type=float, default=1.0, help="share of one CPU for the fastest (default: 1)"
    )
    up.add_argument(
        "--database", action="store_true", help="the SuperLink survives a restart of its process"
    )
    up.set_defaults(do=_up)
    status = kinds.add_parser("status", help="say what runs")
    status.set_defaults(do=_status)
    down = kinds.add_parser("down", help="end what `up` started and remove its files")
    down.add_argument("--keep", action="store_true", help="leave the files, to read the logs")
    down.set_defaults(do=_down)
    for command in (up, status, down):
        command.add_argument(
            "--dir", default=DEFAULT_FOLDER, help=f"the fleet's folder (default: {DEFAULT_FOLDER})"
        )
    keys = kinds.add_parser("certificates", help="make keys and certificates for real devices")
    keys.add_argument(
        "dir",
        help="folder for the files; an authority in it is used again, its ca.key for --host only",
    )
    keys.add_argument("--host", nargs="+", default=[], help="the SuperLink's names and addresses")
    keys.add_argument("--node", nargs="+", default=[], help="names of devices that need a key")
    keys.add_argument("--days", type=int, default=certificates.SERVER_DAYS,
                      help=f"validity of the SuperLink's certificate (default: "
                      f"{certificates.SERVER_DAYS})")  # fmt: skip
    keys.set_defaults(do=_certificates)
    return parser


def _up(options: argparse.Namespace) -> None:
    fleet = RealFleet(Path(options.dir).expanduser())
    profiles = named_fleet(options.fleet, options.nodes)
    fleet.up(
        profiles,
        cpu=options.cpu,
        database=options.database,
        say=lambda text: print(f"... {text}", flush=True),
    )
    _status(options)
    print("\nRun an app on it:\n")
    print(f"  {fleet.run_line()}\n")


def _status(options: argparse.Namespace) -> None:
    fleet = RealFleet(Path(options.dir).expanduser())
    file, online = fleet.file, fleet.online()
    alive = "running" if fleet.is_alive(file.superlink_pid) else "ended"
    print(f"SuperLink  https://{file.address}  {alive}  logs in {fleet.folder / 'logs'}")
    if file.needs_warden:
        is_alive = fleet.is_alive(file.warden_pid)
        if not is_alive:
            fleet.wake()  # whom it had stopped when it was killed
        alive = "running" if is_alive else "ENDED, there are no limits"
        print(f"warden     {alive}: CPU shares by stopping and continuing, links by a relay")
    for node in file.nodes:
        state = "ended" if not fleet.is_alive(node.pid) else "starting or cut off"
        state = "online" if node.name in online else state
        print(f"{node.name:<10} {state:<8} {_limits(node)}")


def _limits(node: Node) -> str:
    cpu = "no limit" if node.cpu == 1 else f"{node.cpu:.3g} CPU"
    speeds = (("up", node.uplink_mbps), ("down", node.downlink_mbps))
    return ", ".join(
        [cpu, *(f"{name} {mbps:g} Mbit/s" for name, mbps in speeds if not isinf(mbps))]
    )


def _down(options: argparse.Namespace) -> None:
    ended = RealFleet(Path(options.dir).expanduser()).down(keep=options.keep)
    print(f"{ended} processes ended")


def _certificates(options: argparse.Namespace) -> None:
    folder = Path(options.dir).expanduser()
    wants_authority = options.host or not options.node  # a device's key needs no signature
    if wants_authority and not certificates.has_authority(folder):
        certificates.make_authority(folder)
        print(f"authority: {folder / certificates.CA_CERTIFICATE} goes to every device")
        print(f"           {folder / certificates.CA_KEY} stays here, or offline")
    if options.host:
        certificates.make_server_certificate(folder, options.host, options.days)
        names = f"{folder / certificates.SERVER_CERTIFICATE}, {folder / certificates.SERVER_KEY}"
        print(f"SuperLink: {names} ({options.days} days)")
    for node in options.node:
        certificates.make_node_key(folder / "nodes", node)
        print(f"{node}: {folder / 'nodes' / node} goes to that device only, .pub is registered")

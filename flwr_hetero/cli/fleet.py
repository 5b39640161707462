"""Commands on real fleets: ``fleet up``, ``status``, ``down``, ``certificates``."""

import argparse
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr_hetero.cli.run import add_command
from flwr_hetero.errors import check_count

if TYPE_CHECKING:
    from flwr_hetero.fleet.processes import SuperNodeSpec
    from flwr_hetero.fleet.real_fleet import RealFleet

FOLDER = "~/flwr-hetero-fleet"
SUPERNODE = "supernode"


def add(above: Any) -> None:
    """Add the commands to the command line."""
    # The command line passes its options on unread; this line is only for the help.
    above.add_parser(SUPERNODE, help="run a SuperNode that is kept warm: a message starts in 0.3 s")

    text = "start a real fleet on this machine, or make keys for one elsewhere"
    commands = above.add_parser("fleet", help=text, description=text).add_subparsers(
        required=True, metavar="COMMAND"
    )
    warning = (
        ". While they are up, EVERY USER OF THIS MACHINE CAN RUN CODE AS YOU: Flower's SuperLink "
        "asks for no credentials on 127.0.0.1."
    )
    text = "start a SuperLink and SuperNodes with TLS and keys"
    up = add_command(commands, "up", _up, text, warning)
    up.add_argument("--nodes", type=int, default=4, help="number of SuperNodes (default: 4)")
    text = "uniform (default), paper-5 or a TOML file of devices; speeds become shares of one CPU"
    up.add_argument("--fleet", default="uniform", help=text)
    text = "share of one CPU for the fastest node (default: 1)"
    up.add_argument("--cpu", type=float, default=1.0, help=text)
    text = "start a new process for each message, as Flower's own SuperNodes do"
    up.add_argument("--cold", action="store_true", help=text)
    status = add_command(commands, "status", _status, "show which processes run")
    down = add_command(commands, "down", _down, "end the processes of a fleet, remove its files")
    for parser in (up, status, down):
        parser.add_argument("--dir", default=FOLDER, help=f"folder of the fleet ({FOLDER})")
    text = "make keys and certificates for devices elsewhere"
    certificates = add_command(commands, "certificates", _certificates, text)
    text = "folder; an authority in it is used again, and its ca.key is read only for --host"
    certificates.add_argument("dir", help=text)
    text = "names and addresses of the SuperLink"
    certificates.add_argument("--host", nargs="+", default=[], help=text)
    text = "names of devices that need a key"
    certificates.add_argument("--node", nargs="+", default=[], help=text)


def supernode(arguments: list[str]) -> int:
    """Run a SuperNode that is kept warm, with the options of ``flower-supernode``."""
    from flwr_hetero.fleet.supernode import main

    main(arguments)
    return 0


def _fleet(options: argparse.Namespace) -> "RealFleet":
    from flwr_hetero.fleet.real_fleet import RealFleet

    return RealFleet(Path(options.dir).expanduser())


def _up(options: argparse.Namespace) -> None:
    from flwr_hetero.client.device import named_fleet

    check_count("--nodes", options.nodes, 1)
    fleet = _fleet(options)
    print("starting a SuperLink and SuperNodes, and waiting until they are online", flush=True)
    fleet.up(named_fleet(options.fleet, options.nodes), cpu=options.cpu, warm=not options.cold)
    _status(options)
    print(f"\nRun an app on it:\n\n  {fleet.run_line()}\n")


def _status(options: argparse.Namespace) -> None:
    fleet = _fleet(options)
    file = fleet.file
    online = fleet.online()
    state = "running" if fleet.is_alive(file.superlink_pid) else "ended"
    print(f"SuperLink  https://{file.address}  {state}  logs in {fleet.folder / 'logs'}")
    if file.needs_throttle:
        is_throttled = fleet.is_alive(file.throttle_pid)
        state = "running" if is_throttled else "ENDED, there are no limits"
        print(f"throttle   {state}: CPU shares by stopping and continuing, links by a relay")
    for node in file.nodes:
        state = "starting or cut off" if fleet.is_alive(node.pid) else "ended"
        if node.name in online:
            state = "online"
        print(f"{node.name:<10} {state:<8} {_limits_of(node)}")


def _limits_of(node: "SuperNodeSpec") -> str:
    limits = ["no limit" if node.cpu == 1 else f"{node.cpu:.3g} CPU"]
    for direction, mbps in (("up", node.uplink_mbps), ("down", node.downlink_mbps)):
        if not isinf(mbps):
            limits.append(f"{direction} {mbps:g} Mbit/s")
    return ", ".join(limits)


def _down(options: argparse.Namespace) -> None:
    print(f"{_fleet(options).down()} processes ended")


def _certificates(options: argparse.Namespace) -> None:
    from flwr_hetero.fleet import certificates

    folder = Path(options.dir).expanduser()
    # A device's key needs no signature, and therefore no authority.
    needs_authority = options.host or not options.node
    if needs_authority and not (folder / certificates.CA_CERTIFICATE).exists():
        certificates.make_authority(folder)
        print(f"authority: {folder / certificates.CA_CERTIFICATE} goes to every device")
        print(f"           {folder / certificates.CA_KEY} stays here, or offline")
    if options.host:
        certificates.make_server_certificate(folder, options.host)
        names = f"{folder / certificates.SERVER_CERTIFICATE}, {folder / certificates.SERVER_KEY}"
        print(f"SuperLink: {names} ({certificates.SERVER_DAYS} days)")
    for node in options.node:
        certificates.make_node_key(folder / "nodes", node)
        print(f"{node}: {folder / 'nodes' / node} goes to that device only, .pub is registered")

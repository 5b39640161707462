"""Commands on real fleets: ``fleet up``, ``status``, ``down``, ``certificates``."""

import argparse
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr_hetero.cli.run import add_command
from flwr_hetero.errors import check_count

if TYPE_CHECKING:
    from flwr_hetero.fleet.real_fleet import RealFleet

FOLDER = "~/flwr-hetero-fleet"
SUPERNODE = "supernode"


def add(above: Any) -> None:
    """Add the commands to the command line."""
    # its options never get here, but its name and text do
    above.add_parser(SUPERNODE, help="Flower's SuperNode, kept warm: a message starts in 0.3 s")

    text = "a real fleet on this machine, and keys for one elsewhere"
    commands = above.add_parser("fleet", help=text, description=text).add_subparsers(
        required=True, metavar="COMMAND"
    )

    others = ". While they are up, EVERY USER OF THIS MACHINE CAN RUN CODE AS YOU: Flower's "
    others += "SuperLink asks for no credentials on 127.0.0.1."
    # Said where it is asked for: a private fleet on a shared machine is none.
    text = "start a SuperLink and SuperNodes with TLS and keys"
    parser = add_command(commands, "up", _up, text, others)
    up = parser.add_argument
    up("--nodes", type=int, default=4, help="SuperNodes (default: 4)")
    kinds = "uniform, paper-5 or a TOML file of devices: speeds become shares of one CPU"
    up("--fleet", default="uniform", help=kinds)
    up("--cpu", type=float, default=1.0, help="share of one CPU for the fastest (default: 1)")
    up("--cold", action="store_true", help="nodes as Flower's own: a new process for each message")
    status = add_command(commands, "status", _status, "show which processes run")
    down = add_command(commands, "down", _down, "end what `up` started and remove its files")
    for each in (parser, status, down):
        each.add_argument("--dir", default=FOLDER, help=f"the fleet's folder (default: {FOLDER})")
    text = "make keys and certificates for real devices"
    add = add_command(commands, "certificates", _certificates, text).add_argument
    add("dir", help="folder; an authority in it is used again, its ca.key for --host only")
    add("--host", nargs="+", default=[], help="the SuperLink's names and addresses")
    add("--node", nargs="+", default=[], help="names of devices that need a key")


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
    file, online = fleet.file, fleet.online()
    state = "running" if fleet.is_alive(file.superlink_pid) else "ended"
    print(f"SuperLink  https://{file.address}  {state}  logs in {fleet.folder / 'logs'}")
    if file.needs_throttle:
        throttled = fleet.is_alive(file.throttle_pid)
        state = "running" if throttled else "ENDED, there are no limits"
        print(f"throttle   {state}: CPU shares by stopping and continuing, links by a relay")
    for node in file.nodes:
        state = "ended" if not fleet.is_alive(node.pid) else "starting or cut off"
        state = "online" if node.name in online else state
        cpu = "no limit" if node.cpu == 1 else f"{node.cpu:.3g} CPU"
        speeds = {"up": node.uplink_mbps, "down": node.downlink_mbps}
        links = [f", {name} {mbps:g} Mbit/s" for name, mbps in speeds.items() if not isinf(mbps)]
        print(f"{node.name:<10} {state:<8} {cpu}{''.join(links)}")


def _down(options: argparse.Namespace) -> None:
    print(f"{_fleet(options).down()} processes ended")


def _certificates(options: argparse.Namespace) -> None:
    from flwr_hetero.fleet import certificates

    folder = Path(options.dir).expanduser()
    # A device's key needs no signature, and no authority therefore.
    wants_authority = options.host or not options.node
    if wants_authority and not (folder / certificates.CA_CERTIFICATE).exists():
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

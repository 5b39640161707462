"""Commands on real fleets: ``fleet up``, ``down``, ``certificates``, and ``supernode``."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr_hetero.cli.parsing import add_command, end_of_help
from flwr_hetero.errors import check_count

if TYPE_CHECKING:
    from flwr_hetero.fleet.real_fleet import RealFleet

FOLDER = "~/flwr-hetero-fleet"
SUPERNODE = "supernode"
PAGE = "deploy/README.md#try-it-on-one-machine"
KEYS_PAGE = "deploy/README.md#2-keys-and-certificates-on-the-server"
SUPERNODE_END = end_of_help(
    "supernode --superlink superlink.lan:9092 --root-certificates ca.crt",
    "docs/howto.md#keep-nodes-warm",
)
# The help of the command itself has this warning, since users of a shared machine must see it.
WARNING = (
    ". While they run, EVERY USER OF THIS MACHINE CAN RUN CODE AS YOU: Flower's SuperLink asks "
    "for no credentials on 127.0.0.1."
)


def add(commands: Any) -> None:
    """Add the commands to the command line."""
    # main() passes the options of this command to Flower, so only its help is added here.
    text = "Flower's SuperNode, kept warm: a message starts in 0.3 s"
    commands.add_parser(SUPERNODE, help=text)

    text = "run a real fleet on this machine, and make keys for real devices"
    end = end_of_help("fleet up --nodes 3", PAGE)
    fleet = commands.add_parser("fleet", help=text, description=text, epilog=end)
    fleet_commands = fleet.add_subparsers(required=True, metavar="COMMAND")

    text = "start a SuperLink and SuperNodes with TLS and keys"
    end = end_of_help("fleet up --nodes 5", PAGE)
    up = add_command(fleet_commands, "up", _up, text, end, WARNING)
    up.add_argument("--nodes", type=int, default=4, help="SuperNodes (default: 4)")
    text = "use Flower's own SuperNodes, which start a new process for each message"
    up.add_argument("--cold", action="store_true", help=text)

    text = "stop what `up` started and remove its files"
    down = add_command(fleet_commands, "down", _down, text, end_of_help("fleet down", PAGE))
    text = f"folder of the fleet (default: {FOLDER})"
    for parser in (up, down):
        parser.add_argument("--dir", default=FOLDER, help=text)

    text = "make keys and certificates for real devices"
    example = "fleet certificates keys --host superlink.lan --node jetson-1"
    end = end_of_help(example, KEYS_PAGE)
    certificates = add_command(fleet_commands, "certificates", _certificates, text, end)
    text = "folder; its certificate authority is used again, whose ca.key is needed for --host only"
    certificates.add_argument("dir", help=text)
    text = "names and addresses of the SuperLink"
    certificates.add_argument("--host", nargs="+", default=[], help=text)
    text = "names of devices that need a key"
    certificates.add_argument("--node", nargs="+", default=[], help=text)


def supernode(arguments: list[str]) -> int:
    """Run a SuperNode that is kept warm, with the options of ``flower-supernode``."""
    from flwr_hetero.fleet.supernode import main

    # Flower prints the help of its options.
    if {"-h", "--help"} & {*arguments}:
        print(SUPERNODE_END, flush=True)
    main(arguments)
    return 0


def _fleet(options: argparse.Namespace) -> "RealFleet":
    from flwr_hetero.fleet.real_fleet import RealFleet

    return RealFleet(Path(options.dir).expanduser())


def _up(options: argparse.Namespace) -> None:
    check_count("--nodes", options.nodes, 1)
    fleet = _fleet(options)
    # Each step has a line in Flower's log.
    fleet.up(options.nodes, warm=not options.cold)
    print(f"\n{options.nodes} SuperNodes are online. Logs are in {fleet.folder / 'logs'}.")
    print(f"To run an app on this fleet:\n\n  {fleet.run_line()}\n")


def _down(options: argparse.Namespace) -> None:
    print(f"{_fleet(options).down()} processes stopped")


def _certificates(options: argparse.Namespace) -> None:
    from flwr_hetero.fleet import certificates

    folder = Path(options.dir).expanduser()
    # A key of a device is not signed, so it needs no authority.
    needs_authority = options.host or not options.node
    if needs_authority and not (folder / certificates.CA_CERTIFICATE).exists():
        certificates.make_authority(folder)
        print(f"authority: copy {folder / certificates.CA_CERTIFICATE} to every device")
        print(f"           keep {folder / certificates.CA_KEY} here, or offline")
    if options.host:
        certificates.make_server_certificate(folder, options.host)
        files = f"{folder / certificates.SERVER_CERTIFICATE}, {folder / certificates.SERVER_KEY}"
        print(f"SuperLink: {files} ({certificates.SERVER_DAYS} days)")
    for node in options.node:
        certificates.make_node_key(folder / "nodes", node)
        key = folder / "nodes" / node
        print(f"{node}: copy {key} to that device only, and register {key.name}.pub")

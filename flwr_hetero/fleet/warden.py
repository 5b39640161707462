"""The process beside a fleet that keeps its devices slow: CPU shares and links.

Started by ``up`` as ``python -m flwr_hetero.fleet.warden FOLDER`` if a device has a limit.
"""

import asyncio
import signal
import sys
from contextlib import suppress
from pathlib import Path

from flwr_hetero.fleet.cpu_share import Throttle
from flwr_hetero.fleet.fleet_file import FILE, HOST, FleetFile
from flwr_hetero.fleet.link import Link
from flwr_hetero.fleet.marked import has_mark

LOOK_S = 0.02
"""Seconds between two looks at the devices' processes."""


async def keep_watch(folder: Path) -> None:
    """Enforce the limits of a fleet until cancelled; then let everything run freely.

    Parameters
    ----------
    folder : Path
        The fleet's folder. Its file is read again when it changes: a restarted SuperNode has
        another process id.
    """
    fleet = FleetFile.load(folder)
    throttles = {node.name: Throttle(node.cpu) for node in fleet.nodes if node.cpu < 1}
    links = [
        (node, Link((HOST, fleet.port), node.uplink_mbps, node.downlink_mbps))
        for node in fleet.nodes
        if node.has_link
    ]
    for node, link in links:
        await link.listen(node.link_port)
    changed_ns = 0
    try:
        while True:
            if (now_ns := (folder / FILE).stat().st_mtime_ns) != changed_ns:
                fleet, changed_ns = FleetFile.load(folder), now_ns
            for name, throttle in throttles.items():
                if has_mark(pid := fleet.node(name).pid, folder):
                    throttle.look(pid)
            await asyncio.sleep(LOOK_S)
    finally:
        for name, throttle in throttles.items():
            if has_mark(pid := fleet.node(name).pid, folder):
                throttle.release(pid)
        for _, link in links:
            await link.close()


async def _until_told(folder: Path) -> None:
    watch = asyncio.ensure_future(keep_watch(folder))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, watch.cancel)
    with suppress(asyncio.CancelledError):
        await watch


if __name__ == "__main__":
    asyncio.run(_until_told(Path(sys.argv[1])))

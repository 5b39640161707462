"""Wait for nodes, but not for ever."""

import time
from collections.abc import Set
from logging import INFO

from flwr.common.logger import log
from flwr.serverapp import Grid

from flwr_hetero.strategy.grid_view import is_simulated

WAIT_S = 600.0
"""Seconds to wait for a fleet of which nobody is there."""
SETTLE_S = 20.0
"""Seconds to wait for a further node of a fleet that comes online."""


def online_nodes(grid: Grid) -> Set[int]:
    """Return the nodes online as a set, without copying one.

    Parameters
    ----------
    grid : Grid
        The fleet.

    Returns
    -------
    set of int
        Node ids.
    """
    node_ids = grid.get_node_ids()
    return node_ids if isinstance(node_ids, Set) else set(node_ids)


def wait_for_nodes(grid: Grid, at_least: int, wait_s: float) -> Set[int]:
    """Wait until enough nodes are online, or until time is up.

    Parameters
    ----------
    grid : Grid
        The fleet. Simulated nodes are there or will never be: no time is spent on them.
    at_least : int
        Nodes wanted.
    wait_s : float
        Longest wait in seconds.

    Returns
    -------
    set of int
        Nodes online; fewer than wanted if time is up.

    Raises
    ------
    RuntimeError
        If there is no node at all.
    """
    waited_s = 0.0
    while len(online := online_nodes(grid)) < at_least:
        if waited_s >= wait_s or is_simulated(grid):
            break
        log(INFO, "Waiting for nodes: %d of %d", len(online), at_least)
        time.sleep(1)
        waited_s += 1
    if not online:
        raise RuntimeError(
            f"no node is online after {waited_s:.0f} s: start the SuperNodes, or raise wait_s."
        )
    return online


def settled_nodes(
    grid: Grid, wanted: int, wait_s: float = WAIT_S, settle_s: float = SETTLE_S
) -> Set[int]:
    """Wait until as many nodes as wanted are online, or until no further one comes.

    Parameters
    ----------
    grid : Grid
        The fleet; no time is spent on simulated nodes.
    wanted : int
        Nodes to wait for; a fleet may have fewer.
    wait_s : float
        Longest wait for the first node in seconds.
    settle_s : float
        Longest wait for each further one in seconds.

    Returns
    -------
    set of int
        Nodes online, at least one.

    Raises
    ------
    RuntimeError
        If there is no node at all.
    """
    online = wait_for_nodes(grid, 1, wait_s)
    while len(online) < wanted:
        before = len(online)
        online = wait_for_nodes(grid, before + 1, settle_s)
        if len(online) <= before:
            break
    return online

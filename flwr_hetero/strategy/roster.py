"""Who is who: a stable identity for nodes whose ids change from run to run."""

import hashlib
import re

from flwr.serverapp import Grid

from flwr_hetero.strategy.grid_view import is_simulated


class Roster:
    """Map Flower's node ids to identities that stay the same over rounds and runs.

    The identity is, in this order of preference: the name given at registration, a hash of the
    node's public key, the ``partition-id`` that the node reports, the node id. Two nodes that
    claim the same identity keep apart: the second stays with its node id.

    Examples
    --------
    >>> roster = Roster()
    >>> roster.hear(8812, partition_id=3)
    >>> roster.identity(8812), roster.identity(77)
    ('node-3', 'id-77')
    """

    def __init__(self) -> None:
        self._identity: dict[int, str] = {}
        self._node_id: dict[str, int] = {}

    def learn(self, grid: Grid) -> None:
        """Read names and public keys of the nodes online.

        Parameters
        ----------
        grid : Grid
            Asked for ``get_nodes`` once; not at all if its nodes are simulated, whose keys are
            drawn afresh for each run.
        """
        if is_simulated(grid):
            return
        for info in grid.get_nodes():
            if info.name:
                self._claim(info.node_id, f"{info.name}")
            elif info.public_key:
                self._claim(info.node_id, f"key-{hashlib.sha256(info.public_key).hexdigest()[:12]}")

    def hear(self, node_id: int, partition_id: int) -> None:
        """Take note of the partition that a node reports; a better identity is kept.

        Parameters
        ----------
        node_id : int
            Flower's node id.
        partition_id : int
            The node's ``partition-id``.
        """
        if node_id not in self._identity:
            self._claim(node_id, f"node-{partition_id}")

    def knows(self, node_id: int) -> bool:
        """Tell whether a node has an identity better than its node id.

        Parameters
        ----------
        node_id : int
            Flower's node id.

        Returns
        -------
        bool
            True once a name, key or partition is known.
        """
        return node_id in self._identity

    def identity(self, node_id: int) -> str:
        """Return a node's stable identity.

        Parameters
        ----------
        node_id : int
            Flower's node id.

        Returns
        -------
        str
            For instance ``node-3``; ``id-<node id>`` as long as nothing better is known.
        """
        return self._identity.get(node_id, f"id-{node_id}")

    def find(self, identity: str) -> int | None:
        """Return the node id that now belongs to an identity.

        Parameters
        ----------
        identity : str
            As returned by :meth:`identity`.

        Returns
        -------
        int or None
            Flower's node id; None if no node of that identity was seen in this run.
        """
        if identity not in self._node_id and re.fullmatch(r"id-\d+", identity):
            return int(identity[3:])
        return self._node_id.get(identity)

    def sort_key(self, node_id: int) -> tuple[str, int, str]:
        """Return a key that sorts nodes by identity, numbers by value.

        Parameters
        ----------
        node_id : int
            Flower's node id.

        Returns
        -------
        tuple
            ``node-9`` comes before ``node-10``.
        """
        return natural_key(self.identity(node_id))

    def _claim(self, node_id: int, identity: str) -> None:
        owner = self._node_id.setdefault(identity, node_id)
        if owner == node_id:
            self._identity[node_id] = identity

    def forget(self, node_id: int) -> None:
        """Free the identity of a node that is gone, so that it can come back under a new id.

        Parameters
        ----------
        node_id : int
            Flower's node id.
        """
        identity = self._identity.pop(node_id, None)
        if identity is not None:
            del self._node_id[identity]


def natural_key(identity: str) -> tuple[str, int, str]:
    """Return a sort key that orders trailing numbers by value.

    Parameters
    ----------
    identity : str
        For instance ``node-10``.

    Returns
    -------
    tuple of str, int, str
        Text before the number, the number (-1 if none), the whole.

    Examples
    --------
    >>> sorted(["node-10", "node-9"], key=natural_key)
    ['node-9', 'node-10']
    """
    match = re.fullmatch(r"(.*?)(\d+)", identity)
    return (match[1], int(match[2]), identity) if match else (identity, -1, identity)

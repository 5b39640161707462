"""Votes of nodes on which arrays of the model are trained."""

from collections import Counter
from collections.abc import Iterable, Sequence


class Votes:
    """Which arrays the last reply of each node left out.

    Nodes that leave out the same share one set, which may hold hundreds of names.

    >>> votes = Votes()
    >>> for node, names in {"a": {"base"}, "b": {"base"}, "c": set()}.items():
    ...     votes.cast(node, frozenset(names))
    >>> votes.by_array()
    Counter({'base': 2})
    """

    def __init__(self) -> None:
        self.by_node: dict[str, frozenset[str]] = {}
        # By set of arrays: the number of nodes that leave it out.
        self._counts = Counter[frozenset[str]]()

    def cast(self, node: str, names: frozenset[str]) -> None:
        """Replace the vote of a node."""
        before = self.by_node.get(node)
        if before == names:
            return
        if before is not None:
            self._counts[before] -= 1
            if not self._counts[before]:
                del self._counts[before]
        self._counts[names] += 1
        self.by_node[node] = names

    def by_array(self) -> Counter[str]:
        """Count by array how many nodes leave it out."""
        found = Counter[str]()
        for names, count in self._counts.items():
            found.update(dict.fromkeys(names, count))
        return found

    def to_json(self) -> list[tuple[list[str], list[str]]]:
        """Write each set of arrays once, with the nodes that leave it out."""
        nodes_of: dict[frozenset[str], list[str]] = {}
        for node, names in self.by_node.items():
            nodes_of.setdefault(names, []).append(node)
        return [(sorted(names), nodes) for names, nodes in nodes_of.items()]

    @classmethod
    def from_json(cls, saved: Iterable[tuple[Sequence[str], Sequence[str]]]) -> "Votes":
        """Read what :meth:`to_json` wrote."""
        votes = cls()
        for names, nodes in saved:
            shared = frozenset(map(str, names))
            for node in nodes:
                votes.cast(str(node), shared)
        return votes

"""A Grid that shows only some of its nodes."""

from collections.abc import Iterable, Sequence

from flwr.app import Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run


class GridView(Grid):
    """Show only the chosen nodes of a grid; everything else goes through.

    This is how a selection reaches any Flower strategy without a change to it.

    Parameters
    ----------
    grid : Grid
        The whole grid.
    node_ids : sequence of int
        The nodes to show, in this order.
    """

    def __init__(self, grid: Grid, node_ids: Sequence[int]) -> None:
        self.grid = grid
        self.node_ids = list(node_ids)

    def set_run(self, run: Run) -> None:
        """Set the run of the whole grid."""
        self.grid.set_run(run)

    @property
    def run(self) -> Run:
        """Run information."""
        return self.grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Make a message."""
        return self.grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the chosen nodes."""
        return list(self.node_ids)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return what is known of the chosen nodes."""
        chosen = set(self.node_ids)
        return [info for info in self.grid.get_nodes() if info.node_id in chosen]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages."""
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull replies."""
        return self.grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages and wait for the replies."""
        return self.grid.send_and_receive(messages, timeout=timeout)


def is_simulated(grid: Grid) -> bool:
    """Tell whether a grid's nodes are simulated, so that they may report emulated times.

    Parameters
    ----------
    grid : Grid
        Flower's or ours, or a view of one.

    Returns
    -------
    bool
        True for an in-process grid and for Flower's simulation engine, False in deployment,
        where no node may claim to be emulated.
    """
    while isinstance(grid, GridView):
        grid = grid.grid
    return hasattr(grid, "virtual_time_s") or type(grid).__name__ == "InMemoryGrid"

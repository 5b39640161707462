"""A Grid around a Grid whose nodes run a ClientApp of Flower's older API."""

from collections.abc import Iterable
from logging import WARNING
from math import inf
from typing import Any

from flwr.app import Error, Message
from flwr.serverapp import Grid

from flwr_hetero._flwr import CLIENT_APP_RAISED, log
from flwr_hetero.errors import invalid
from flwr_hetero.older.records import OlderMessage, from_older, to_older
from flwr_hetero.server.nodes import GridAround, whole_grid


class OlderClients(GridAround):
    """Let strategies train clients of Flower's older API: ``NumPyClient`` and ``client_fn``.

    ``strategy.start(grid=OlderClients(grid), ...)`` is all that changes on the server. A client's
    ``config`` holds what the strategy sends; numbers in its metrics become the reply's.

    Parameters
    ----------
    grid : Grid
        What the ServerApp is given, or a :class:`~flwr_hetero.fleet.LocalGrid`.

    Raises
    ------
    ValueError
        If it is no Grid, or one of these already. By ``start``, if the strategy sends more than
        one ArrayRecord, or a list in its config: the older API has neither.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord
    >>> from flwr.client import NumPyClient
    >>> from flwr.clientapp import ClientApp
    >>> from flwr_hetero.fleet import DeviceProfile, LocalGrid
    >>> from flwr_hetero.strategy import TiFL
    >>> class Client(NumPyClient):
    ...     def fit(self, parameters, config):
    ...         return [w + 1 for w in parameters], 10, {}
    ...     def evaluate(self, parameters, config):
    ...         return 0.5, 10, {}
    >>> app = ClientApp(client_fn=lambda context: Client().to_client())
    >>> grid = OlderClients(LocalGrid(app, [DeviceProfile()] * 2))
    >>> strategy = TiFL(clients_per_round=2, num_tiers=1)
    >>> result = strategy.start(grid, ArrayRecord([np.zeros(2)]), num_rounds=3)
    >>> result.arrays.to_numpy_ndarrays()
    [array([3., 3.])]
    """

    def __init__(self, grid: Grid) -> None:
        if not isinstance(grid, Grid):
            raise invalid("grid", type(grid).__name__, "be the Grid that the ServerApp is given")
        if isinstance(whole_grid(grid), OlderClients):
            raise invalid("grid", "OlderClients", "be wrapped only once")
        super().__init__(grid)
        self._sent: dict[str, OlderMessage] = {}
        self._told: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        """Show what else a grid has, such as the clock of a LocalGrid."""
        if name == "grid" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.grid, name)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages in the older form."""
        sent = [to_older(message) for message in {id(each): each for each in messages}.values()]
        ids = list(self.grid.push_messages([each.message for each in sent]))
        self._remember(sent)
        return ids

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages and wait for the replies."""
        sent = [to_older(message) for message in {id(each): each for each in messages}.values()]
        replies = self.grid.send_and_receive([each.message for each in sent], timeout=timeout)
        self._remember(sent)
        return self._from_older(replies)

    def _remember(self, sent: list[OlderMessage]) -> None:
        """Remember how the strategy named the model, for the reply; a message sent has an id."""
        self._sent |= {own.message.metadata.message_id: own for own in sent if own.category}

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull replies, in today's form."""
        return self._from_older(self.grid.pull_messages(message_ids))

    def wait_for(
        self, message_ids: Iterable[str], timeout: float | None = None, enough: int | None = None
    ) -> list[Message]:
        """Wait for replies of a :class:`~flwr_hetero.fleet.LocalGrid`."""
        fleet: Any = self.grid
        return self._from_older(fleet.wait_for(message_ids, timeout, enough))

    def wait_for_next(self, message_ids: Iterable[str], until_s: float = inf) -> list[Message]:
        """Wait for the next reply of a :class:`~flwr_hetero.fleet.LocalGrid`."""
        fleet: Any = self.grid
        return self._from_older(fleet.wait_for_next(message_ids, until_s))

    def _from_older(self, replies: Iterable[Message]) -> list[Message]:
        return [self._read(reply) for reply in replies]

    def _read(self, reply: Message) -> Message:
        """Convert a reply; one that cannot be becomes an error, as if the node had sent that."""
        sent = self._sent.pop(reply.metadata.reply_to_message_id, None)
        if sent is None or reply.has_error():
            return reply
        body: Any
        try:
            body, others = from_older(reply.content, sent)
        except Exception as error:  # whatever a node may send
            body, others = Error(CLIENT_APP_RAISED, f"{type(error).__name__}: {error}"), {}
        if new := {name: kind for name, kind in others.items() if name not in self._told}:
            self._told |= new.keys()
            names = ", ".join(f"{name} ({kind})" for name, kind in new.items())
            log(WARNING, "OlderClients: metrics that are no numbers are left out: %s", names)
        return Message(body, metadata=reply.metadata)  # type: ignore[call-overload,no-any-return]

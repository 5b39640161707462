"""A Grid around a Grid whose nodes run a ClientApp of Flower's older API."""

from collections.abc import Iterable
from logging import WARNING
from math import inf
from typing import Any

from flwr.app import Error, Message
from flwr.serverapp import Grid

from flwr_hetero._flwr import CLIENT_APP_RAISED, log
from flwr_hetero.errors import invalid
from flwr_hetero.older.records import Asked, asked_in, from_older, to_older
from flwr_hetero.server.nodes import GridAround, whole_grid

CATEGORIES = ("train", "evaluate")


class OlderClients(GridAround):
    """Let strategies train clients of Flower's older API: ``NumPyClient`` and ``client_fn``.

    ``strategy.start(grid=OlderClients(grid), ...)`` is all that changes on the server, for
    strategies of this package and for those of ``flwr.serverapp.strategy``. Instructions and
    replies are converted as Flower itself does it; all else is the grid's.

    Parameters
    ----------
    grid : Grid
        What the ServerApp is given, or a :class:`~flwr_hetero.fleet.LocalGrid`.

    Raises
    ------
    ValueError
        If it is no Grid, or one of these already. By ``start``, if the strategy sends more than
        one ArrayRecord, or a list in its config: the older API has neither.

    Notes
    -----
    A client's ``config`` holds what the strategy sends: ``server-round``, ``num-steps`` and all
    of ``train_config``. Numbers in the metrics of ``fit()`` and ``evaluate()`` become the reply's
    metrics, beside ``num-examples`` and the ``loss`` of ``evaluate()``; others are left out, and
    the log says so once. Arrays get the names that they have in ``initial_arrays``, in its order.
    Records that mods of this package add to a reply stay in it.

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
        self._asked: dict[str, Asked] = {}
        self._told: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        """Show what else a grid has, such as the clock of a LocalGrid."""
        if name == "grid" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.grid, name)

    # --- out ---------------------------------------------------------------------------

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages in the older form."""
        asked, older = self._to_older(messages)
        ids = list(self.grid.push_messages(older))
        self._remember(asked, older)
        return ids

    def _to_older(self, messages: Iterable[Message]) -> tuple[list[Asked | None], list[Message]]:
        """Convert messages; a twin shares the metadata, so that both get the id when it is sent."""
        asked: list[Asked | None] = []
        older: list[Message] = []
        for message in {id(each): each for each in messages}.values():
            category = message.metadata.message_type.partition(".")[0]
            own = asked_in(message.content, category) if category in CATEGORIES else None
            asked.append(own)
            older.append(_twin(message, to_older(message.content, own)) if own else message)
        return asked, older

    def _remember(self, asked: list[Asked | None], older: list[Message]) -> None:
        for own, message in zip(asked, older, strict=True):
            if own is not None and message.metadata.message_id:
                self._asked[message.metadata.message_id] = own

    # --- in ----------------------------------------------------------------------------

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull replies, in today's form."""
        return self._from_older(self.grid.pull_messages(message_ids))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages and wait for the replies."""
        asked, older = self._to_older(messages)
        replies = self.grid.send_and_receive(older, timeout=timeout)
        self._remember(asked, older)
        return self._from_older(replies)

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
        asked = self._asked.pop(reply.metadata.reply_to_message_id, None)
        if asked is None or reply.has_error():
            return reply
        try:
            content, others = from_older(reply.content, asked)
        except Exception as error:  # whatever a node may send
            reason = f"{type(error).__name__}: {error}"
            return _twin(reply, Error(CLIENT_APP_RAISED, reason))
        self._tell(others)
        return _twin(reply, content)

    def _tell(self, others: dict[str, str]) -> None:
        """Say once of each metric that it is left out."""
        if new := {name: kind for name, kind in others.items() if name not in self._told}:
            self._told |= new.keys()
            names = ", ".join(f"{name} ({kind})" for name, kind in new.items())
            log(WARNING, "OlderClients: metrics that are no numbers are left out: %s", names)


def _twin(message: Message, body: Any) -> Message:
    return Message(body, metadata=message.metadata)  # type: ignore[call-overload,no-any-return]

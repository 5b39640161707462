"""Apps of Flower's older API: ``NumPyClient`` and ``client_fn`` under strategies of today's."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from flwr_hetero import _flwr, keys
from flwr_hetero.arrays import view_array
from flwr_hetero.errors import invalid
from flwr_hetero.exchange.nodes import TranslatingGrid, whole_grid
from flwr_hetero.records import arrays_in, configs_in

__all__ = ["OlderClients"]


class OlderClients(TranslatingGrid):
    """Let strategies train clients of Flower's older API: ``NumPyClient`` and ``client_fn``.

    A client's ``config`` holds the values of the strategy's ConfigRecords. The numbers among a
    client's metrics become the metrics of its reply.

    Parameters
    ----------
    grid : Grid
        The Grid of the ServerApp, or a :class:`~flwr_hetero.fleet.LocalGrid`; else ValueError.
        ``start`` raises ValueError if the strategy sends two ArrayRecords, or a list in its config:
        the older API has neither.

    Examples
    --------
    >>> import numpy as np
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
    >>> start, strategy = ArrayRecord([np.zeros(2)]), TiFL(clients_per_round=2, num_tiers=1)
    >>> strategy.start(grid, start, num_rounds=3).arrays.to_numpy_ndarrays()
    [array([3., 3.])]
    """

    def __init__(self, grid: Grid) -> None:
        if not isinstance(grid, Grid):
            raise invalid("grid", type(grid).__name__, "be the Grid that the ServerApp is given")
        if isinstance(whole_grid(grid), OlderClients):
            raise invalid("grid", "OlderClients", "be wrapped only once")
        super().__init__(grid)
        # The name of the model and those of its arrays, by message.
        self._sent: dict[str, tuple[str, tuple[str, ...]]] = {}

    def write(self, message: Message) -> Message:
        """Convert an instruction to the older form, with this package's own records beside it."""
        category = _category_of(message)
        if category not in ("train", "evaluate"):
            return message
        records = arrays_in(message.content)
        if len(records) != 1:
            rule = "send one ArrayRecord, as the older API has one list of arrays"
            raise invalid("the strategy", list(records), rule)
        config: dict[str, Any] = {}
        for name, record in configs_in(message.content).items():
            if not name.startswith(keys.PREFIX):
                config.update(record)
        for key, value in config.items():
            if isinstance(value, list):
                hint = "give a list as several keys, or as text"
                raise invalid(f"config {key!r}", value, "be one value for clients of Flower", hint)
        (arrays,) = records.values()
        older = _flwr.older_content(category, arrays, config)
        older.update(_own_records(message.content))
        return Message(older, metadata=message.metadata)  # type: ignore[call-overload,no-any-return]

    def sent(self, message: Message, written: Message) -> None:
        """Remember the names in an instruction, for its reply."""
        if written is not message:
            ((name, arrays),) = arrays_in(message.content).items()
            self._sent[message.metadata.message_id] = (name, tuple(arrays))

    def read(self, reply: Message) -> Message:
        """Convert a reply to today's form, or to an error if it cannot be converted."""
        sent = self._sent.pop(reply.metadata.reply_to_message_id, None)
        if sent is None or reply.has_error():
            return reply
        body: Any
        try:
            body = _to_todays_form(reply.content, _category_of(reply), *sent)
        # A node may send anything, so that any error is possible here.
        except Exception as error:
            body = Error(_flwr.CLIENT_APP_RAISED, f"{type(error).__name__}: {error}")
        return Message(body, metadata=reply.metadata)  # type: ignore[call-overload,no-any-return]


def _category_of(message: Message) -> str:
    return message.metadata.message_type.partition(".")[0]


def _to_todays_form(
    content: RecordDict, category: str, model: str, names: tuple[str, ...]
) -> RecordDict:
    """Convert a reply to today's form, with those of its metrics that are numbers."""
    if not _flwr.is_older_reply(content, category):
        return content
    reply = _flwr.read_older(content, category)
    if reply.status != _flwr.OLDER_OK:
        raise ValueError(reply.message)
    metrics: dict[str, Any] = {
        name: int(value) if isinstance(value, bool) else value
        for name, value in reply.metrics.items()
        if isinstance(value, int | float)
    }
    if category != "train":
        metrics["loss"] = float(reply.loss)
    metrics[keys.NUM_EXAMPLES] = int(reply.num_examples)
    records: dict[str, Any] = {"metrics": MetricRecord(metrics)}
    if category == "train":
        records[model] = _named(reply.tensors, reply.tensor_type, names)
    return RecordDict(records | _own_records(content))


def _named(tensors: Sequence[bytes], stype: str, names: tuple[str, ...]) -> ArrayRecord:
    """Give arrays the names in the model; read the type and shape of each from its header."""
    if len(tensors) != len(names):
        raise ValueError(f"fit() returned {len(tensors)} arrays, the model has {len(names)}")
    arrays = [Array("", (), stype, data) for data in tensors]
    for array in arrays:
        # The parser of a bad header may raise any error; the check of replies refuses the array.
        with suppress(Exception):
            values = view_array(array)
            array.dtype = str(values.dtype)
            array.shape = values.shape
    return ArrayRecord(dict(zip(names, arrays, strict=True)))


def _own_records(content: RecordDict) -> dict[str, Any]:
    return {name: record for name, record in content.items() if name.startswith(keys.PREFIX)}

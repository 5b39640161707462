"""Measure how well balanced the orders are in which nodes visit their data."""

from typing import Any, ClassVar

import numpy as np
from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero import keys
from flwr_hetero.cd_grab.algorithm import Vectors, relative_herding
from flwr_hetero.cd_grab.contract import SKETCHES
from flwr_hetero.cd_grab.wire import read_vectors, usual_length
from flwr_hetero.errors import check_count, invalid
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.contract import Contract, check_on_missing
from flwr_hetero.server.wrapper import Wrapper


class HerdingMeter(Wrapper):
    """Ask nodes for small sketches of all their units' gradients, and take the herding bound.

    It works for any order, learnt or not, and changes nothing; each unit costs two bytes times
    the sketch size on top of what the method itself sends.

    Parameters
    ----------
    strategy : Strategy, optional
        What runs; FedAvg if left out.
    sketch_size : int
        Numbers per unit.
    seed : int
        Seed of the sketch.
    on_missing : {"raise", "warn"}
        What to do if no node sends sketches.

    Raises
    ------
    ValueError
        If a setting is out of range.
    MissingHelpError
        In the first round, if no node sends sketches.

    Notes
    -----
    The bound is that of :func:`~flwr_hetero.cd_grab.algorithm.relative_herding`, over the
    nodes of a round, as soon as each has visited all its units; after a resume it starts again.

    Examples
    --------
    >>> from flwr_hetero.strategy import CDGraB
    >>> strategy = HerdingMeter(CDGraB())
    """

    name: ClassVar[str] = "herding"
    decides = frozenset({"herding sketches"})
    contracts = (SKETCHES,)
    only_rounds = "it measures passes of all nodes over one model"

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        sketch_size: int = 64,
        seed: int = 1,
        on_missing: str = "raise",
    ) -> None:
        self.sketch_size = check_count("sketch_size", sketch_size, 1)
        self.seed = check_count("seed", seed)
        self.on_missing = check_on_missing(on_missing)
        super().__init__(strategy)
        self._seen: dict[str, Vectors] = {}
        self._length = 0
        self._bound: float | None = None

    def on_instructions(
        self, context: Exchange, messages: list[Message], grid: Grid
    ) -> list[Message]:
        """Ask for the sketches."""
        for message in messages:
            message.content[keys.HERDING] = ConfigRecord(
                {keys.SKETCH_SIZE: self.sketch_size, keys.SKETCH_SEED: self.seed}
            )
        return messages

    def why_bad(self, context: Exchange, reply: Message) -> str | None:
        """Return why the sketches in a reply cannot be read."""
        record = reply.content.config_records.get(keys.HERDING)
        if record is None or self._is_empty(record):
            return None
        try:
            check_count(keys.NUM_UNITS, record.get(keys.NUM_UNITS), 1)
            length = check_count(keys.SKETCH_SIZE, record.get(keys.SKETCH_SIZE), 1)
            if length > self.sketch_size:
                raise invalid(keys.SKETCH_SIZE, length, f"be at most {self.sketch_size}")
            read_vectors(record, length)
        except ValueError as error:
            return f"herding record: {error}"
        return None

    def on_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Take the sketches out of the replies; drop replies with bad ones."""
        records = [reply.content.config_records.get(keys.HERDING) for reply in replies]
        lengths = [record.get(keys.SKETCH_SIZE) for record in records if record is not None]
        usual = usual_length((n for n in lengths if isinstance(n, int) and n), self._length)
        if usual != self._length:
            self._length, self._seen = usual, {}
        good, passes = [], []
        for reply, record in zip(replies, records, strict=True):
            if record is not None:
                del reply.content[keys.HERDING]
                length = record[keys.SKETCH_SIZE]
                if not self._is_empty(record) and length != usual:
                    context.drop(reply, f"herding record: sketches of {length!r}, not {usual}")
                    continue
                passes.append(self._add(self.identity(reply.metadata.src_node_id), record))
            good.append(reply)
        self._bound, whole = None, [each for each in passes if each is not None]
        if whole and len(whole) == len(passes):
            self._bound = relative_herding(whole)
            self._seen.clear()
        return good

    def helps(self, context: Exchange, reply: Message, contract: Contract) -> bool | None:
        """Return whether a node sends sketches; unclear if it has trained none of its units yet."""
        record = reply.content.config_records.get(keys.HERDING)
        return record is not None and (None if self._is_empty(record) else True)

    def _is_empty(self, record: Any) -> bool:
        return bool(record.get(keys.SKETCH_SIZE) == 0 and record.get(keys.VECTORS) == b"")

    def _add(self, node: str, record: Any) -> Vectors | None:
        """Keep what a node saw; return its last whole pass, if there is one."""
        if self._is_empty(record):
            return None
        num_units, vectors = record[keys.NUM_UNITS], read_vectors(record, record[keys.SKETCH_SIZE])
        if node in self._seen:
            vectors = np.concatenate([self._seen[node], vectors])
        self._seen[node] = vectors[-num_units:]
        return self._seen[node] if len(vectors) >= num_units else None

    def round_info(self) -> dict[str, Any]:
        """Return the bound of the pass that ended in this round, if one did."""
        return {} if self._bound is None else {"herding-bound": self._bound}

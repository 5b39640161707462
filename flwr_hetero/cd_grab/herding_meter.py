"""Measure how well balanced the orders are in which nodes visit their data."""

from collections import Counter
from typing import Any, ClassVar

import numpy as np
from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.cd_grab.algorithm import relative_herding
from flwr_hetero.cd_grab.wire import unpack_vectors
from flwr_hetero.errors import check_count
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

    Raises
    ------
    ValueError
        If a figure is out of range.

    Notes
    -----
    The bound is that of :func:`~flwr_hetero.cd_grab.algorithm.relative_herding`, over the
    nodes of a round, as soon as each has visited all its units; after a resume it starts again.

    Examples
    --------
    >>> from flwr_hetero.cd_grab.strategy import CDGraB
    >>> strategy = HerdingMeter(CDGraB())
    """

    name: ClassVar[str] = "herding"
    decides = frozenset({"herding sketches"})

    def __init__(
        self, strategy: Strategy | None = None, *, sketch_size: int = 64, seed: int = 1
    ) -> None:
        self.sketch_size = check_count("sketch_size", sketch_size, 1, "64 is enough for a plot")
        self.seed = check_count("seed", seed, 0, "any such number will do")
        super().__init__(strategy)
        self._seen: dict[str, NDArray[np.floating]] = {}
        self._length = 0
        self._bound: float | None = None

    def on_instructions(
        self, server_round: int, messages: list[Message], grid: Grid
    ) -> list[Message]:
        """Ask for the sketches."""
        for message in messages:
            message.content[keys.HERDING] = ConfigRecord(
                {keys.SKETCH_SIZE: self.sketch_size, keys.SKETCH_SEED: self.seed}
            )
        return messages

    def on_replies(self, server_round: int, replies: list[Message]) -> list[Message]:
        """Take the sketches out of the replies; drop replies with bad ones."""
        self._agree_on_length(replies)
        good, complete = [], []
        for reply in replies:
            record = reply.content.config_records.get(keys.HERDING)
            if record is not None:
                del reply.content[keys.HERDING]
                try:
                    complete.append(self._add(self.identity(reply.metadata.src_node_id), record))
                except ValueError as error:
                    self.session.fail(reply.metadata.src_node_id, str(error))
                    continue
            good.append(reply)
        self._bound = None
        if complete and all(whole is not None for whole in complete):
            self._bound = relative_herding([whole for whole in complete if whole is not None])
            self._seen.clear()
        return good

    def _agree_on_length(self, replies: list[Message]) -> None:
        """Find the usual length of vectors: no node that comes first may decide for all."""
        records = [reply.content.config_records.get(keys.HERDING) for reply in replies]
        lengths = [r.get(keys.SKETCH_SIZE) for r in records if r is not None]
        counts = Counter(length for length in lengths if isinstance(length, int))
        if counts:
            usual, votes = counts.most_common(1)[0]
            if not self._length or votes > max(1, counts[self._length]):
                self._length, self._seen = usual, {}

    def _add(self, node: str, record: Any) -> NDArray[np.floating] | None:
        """Keep what a node saw; return its last whole pass, if there is one."""
        num_units, data, scale = (
            record.get(key) for key in (keys.NUM_UNITS, keys.VECTORS, keys.SCALE)
        )
        length = record.get(keys.SKETCH_SIZE)
        if not (isinstance(num_units, int) and isinstance(length, int)) or num_units < 1:
            raise ValueError("its herding record lacks units or the length of vectors")
        if length != self._length or not 1 <= length <= self.sketch_size:
            raise ValueError(f"its herding record has vectors of {length} numbers")
        if not (isinstance(data, bytes) and isinstance(scale, float)):
            raise ValueError("its herding record lacks vectors or their scale")
        vectors = unpack_vectors(data, scale, dim=length)
        if node in self._seen:
            vectors = np.concatenate([self._seen[node], vectors])
        self._seen[node] = vectors[-num_units:]
        return self._seen[node] if len(vectors) >= num_units else None

    def round_info(self) -> dict[str, Any]:
        """Return the bound of the pass that ended in this round, if one did."""
        return {} if self._bound is None else {"herding-bound": self._bound}

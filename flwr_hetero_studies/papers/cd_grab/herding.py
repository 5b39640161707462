"""Measure how well the orders of nodes are balanced: a wrapper, and its part on the node."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.cd_grab.algorithm import Vectors
from flwr_hetero.cd_grab.wire import pack_vectors, read_vectors
from flwr_hetero.errors import check_count, invalid
from flwr_hetero.exchange.context import Exchange
from flwr_hetero.server.client_support import ClientSupport
from flwr_hetero.server.wrapper import Wrapper

HERDING = keys.PREFIX + "herding"
"""A ConfigRecord each way. In an instruction: SKETCH_SIZE, SKETCH_SEED. In a reply: NUM_UNITS, and
the VECTORS of all units that the node visited, with their SCALE."""
SKETCHES = ClientSupport(
    HERDING,
    "sketches of its units' gradients",
    "    from flwr_hetero_studies.papers.cd_grab.herding import HERDING, HerdingProbe\n"
    "    probe = HerdingProbe(msg.content.config_records.get(HERDING, {}))\n"
    "    probe.see(batch_gradient(model))  # after each backward(), in the order of the visit\n"
    "    reply.content[HERDING] = ConfigRecord(probe.report(num_units))",
    "which are not in the bound",
)


def relative_herding(passes: Sequence[NDArray[np.floating]]) -> float:
    r"""Eq. 8 in the Euclidean norm, which sketches keep, over a unit's usual deviation.

    .. math:: \max_l \Big\| \sum_{j \le l} \sum_i (v_{ij} - \bar v_i) \Big\|_2 \Big/
              \sqrt{\operatorname{mean}_{ij} \| v_{ij} - \bar v_i \|_2^2}

    passes: per node (num_units, dim), its vectors in the order of the visit; a shorter pass adds
    nothing to longer prefixes. Free of the scale of gradients, which falls in training.

    >>> relative_herding([np.array([[5.0], [5.0], [3.0], [3.0]])])
    2.0
    """
    centred = [np.asarray(each, np.float64) for each in passes]
    centred = [each - each.mean(axis=0) for each in centred]
    steps = np.zeros((max(map(len, centred)), centred[0].shape[1]))
    for each in centred:
        steps[: len(each)] += each
    furthest = np.linalg.norm(np.cumsum(steps, axis=0), axis=1).max()
    squares = np.concatenate([np.square(each).sum(axis=1) for each in centred])
    return float(furthest / (np.sqrt(squares.mean()) or 1.0))


class HerdingProbe:
    """Sketch every unit's gradient for a HerdingMeter; off unless the meter asks for sketches."""

    def __init__(self, instruction: Mapping[str, Any]) -> None:
        self.on = bool(instruction)
        self._instruction = instruction
        self._seen: list[NDArray[np.floating]] = []

    def see(self, gradients: Any) -> None:
        """Take the gradients (num_units, dim) of a batch's units, in the order of the visit."""
        from flwr_hetero.cd_grab.sampler import sketch_gradients  # torch, on nodes only

        if self.on:
            size = self._instruction[keys.SKETCH_SIZE]
            seed = self._instruction[keys.SKETCH_SEED]
            self._seen.append(sketch_gradients(gradients, size, seed))

    def report(self, num_units: int) -> dict[str, int | float | bytes]:
        """Return the ``HERDING`` record of the reply; empty if the probe is off."""
        if not self.on:
            return {}
        size = self._instruction[keys.SKETCH_SIZE]
        vectors = np.concatenate(self._seen) if self._seen else np.zeros((0, size), np.float32)
        # a model may have fewer parameters than a sketch has numbers
        vectors = np.pad(vectors, ((0, 0), (0, size - vectors.shape[1])))
        data, scale = pack_vectors(vectors)
        sizes = {keys.NUM_UNITS: num_units, keys.SKETCH_SIZE: size}
        return {**sizes, keys.VECTORS: data, keys.SCALE: scale}


class HerdingMeter(Wrapper):
    """Ask nodes for small sketches of all their units' gradients, and take the herding bound.

    It changes nothing; a unit costs two bytes times the sketch size. The bound is that of
    :func:`relative_herding`, over the nodes of a round, as soon as each has visited all its units;
    after a resume it starts again.
    """

    name: ClassVar[str] = "herding"
    decides = frozenset({"herding sketches"})
    client_support = (SKETCHES,)
    only_rounds = "it measures passes of all nodes over one model"

    def __init__(
        self, strategy: Strategy | None = None, *, sketch_size: int = 64, seed: int = 1
    ) -> None:
        self.sketch_size = check_count("sketch_size", sketch_size, 1)
        self.seed = check_count("seed", seed)
        super().__init__(strategy)
        self._seen: dict[str, Vectors] = {}
        self._bound: float | None = None

    def on_instructions(
        self, context: Exchange, messages: list[Message], grid: Grid
    ) -> list[Message]:
        for message in messages:
            message.content[HERDING] = ConfigRecord(
                {keys.SKETCH_SIZE: self.sketch_size, keys.SKETCH_SEED: self.seed}
            )
        return messages

    def why_bad(self, context: Exchange, reply: Message) -> str | None:
        record = reply.content.config_records.get(HERDING)
        if record is None:
            return None
        try:
            check_count(keys.NUM_UNITS, record.get(keys.NUM_UNITS), 1)
            length = record.get(keys.SKETCH_SIZE)
            if length != self.sketch_size:
                raise invalid(keys.SKETCH_SIZE, length, f"be {self.sketch_size}")
            read_vectors(record, self.sketch_size)
        except ValueError as error:
            return f"herding record: {error}"
        return None

    def on_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Take the sketches out of the replies, and the bound where all passes are whole."""
        passes = [
            self._add(self.identity(reply.metadata.src_node_id), reply.content.pop(HERDING))
            for reply in replies
            if HERDING in reply.content
        ]
        self._bound = None
        whole = [each for each in passes if each is not None]
        if whole and len(whole) == len(passes):
            self._bound = relative_herding(whole)
            self._seen.clear()
        return replies

    def _add(self, node: str, record: Any) -> Vectors | None:
        """Keep what a node saw; return its last whole pass, if there is one."""
        num_units = record[keys.NUM_UNITS]
        vectors = read_vectors(record, self.sketch_size)
        if node in self._seen:
            vectors = np.concatenate([self._seen[node], vectors])
        self._seen[node] = vectors[-num_units:]
        return self._seen[node] if len(vectors) >= num_units else None

    def round_info(self) -> dict[str, Any]:
        return {} if self._bound is None else {"herding_bound": self._bound}

"""Where a node is in its pass over the data, kept in its state from message to message."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ConfigRecord

SEED, NUMBER, POSITION, SIZE, BATCH = "seed", "number", "position", "size", "batch-size"
ORDER, LENGTHS = "order", "lengths"


class Shape(NamedTuple):
    """Of what data a place is: examples, or batches, and their size; -1 where that is unknown."""

    size: int = -1
    batch_size: int = -1


class Place(NamedTuple):
    """Batches given of the pass with this number; ``order``: its whole order, if that is kept."""

    seed: int
    number: int = 0
    position: int = 0
    order: tuple[Any, ...] | None = None

    @property
    def pass_seed(self) -> int:
        """Seed of this pass: each has another, and the same one in each message."""
        return int(np.random.SeedSequence([self.seed, self.number]).generate_state(1)[0])

    def onward(self) -> "Place":
        """Return the place after one more batch."""
        return self._replace(position=self.position + 1)

    def next_pass(self) -> "Place":
        """Return the beginning of the next pass."""
        return Place(self.seed, self.number + 1)


def to_record(place: Place, shape: Shape) -> ConfigRecord:
    """Make the record of a place; orders that are no numbers are left out."""
    record = ConfigRecord(
        {
            **{SEED: place.seed, NUMBER: place.number, POSITION: place.position},
            **{SIZE: shape.size, BATCH: shape.batch_size},
        }
    )
    if place.order is not None and (packed := _pack(place.order)):
        record[ORDER], record[LENGTHS] = packed
    return record


def from_record(record: Mapping[str, Any] | None, shape: Shape) -> Place | None:
    """Read a place; None if there is none, if it is damaged, or of other data."""
    if record is None or record.get(SIZE) != shape.size or record.get(BATCH) != shape.batch_size:
        return None
    numbers = [record.get(key) for key in (SEED, NUMBER, POSITION)]
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
        return None
    place = Place(*numbers)  # type: ignore[arg-type]
    if ORDER not in record:
        return place
    order = _unpack(record[ORDER], record.get(LENGTHS), shape.size)
    return None if order is None else place._replace(order=order)


def _pack(order: Sequence[Any]) -> tuple[bytes, bytes] | None:
    """Pack batches of indices, or indices: length -1 stands for an index alone."""
    lists = [batch if isinstance(batch, list) else [batch] for batch in order]
    if not all(isinstance(index, (int, np.integer)) for batch in lists for index in batch):
        return None
    lengths = [len(batch) if isinstance(batch, list) else -1 for batch in order]
    flat = [int(index) for batch in lists for index in batch]
    if any(not 0 <= index < 2**31 for index in flat):
        return None
    return np.array(flat, "<i4").tobytes(), np.array(lengths, "<i4").tobytes()


def _unpack(flat: Any, lengths: Any, size: int) -> tuple[Any, ...] | None:
    """Return the order packed; None if it is damaged."""
    if not all(isinstance(part, bytes) and len(part) % 4 == 0 for part in (flat, lengths)):
        return None
    indices, counts = (np.frombuffer(part, "<i4") for part in (flat, lengths))
    spans = np.abs(counts)
    if spans.sum() != len(indices) or (len(indices) and int(indices.min()) < 0):
        return None
    if len(indices) and 0 <= size <= int(indices.max()):
        return None
    ends = np.cumsum(spans)
    parts = [indices[end - span : end].tolist() for end, span in zip(ends, spans, strict=True)]
    return tuple(p[0] if n < 0 else p for p, n in zip(parts, counts, strict=True))

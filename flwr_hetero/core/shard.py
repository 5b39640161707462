"""A device's side of a resharding: its own samples with others' in some of the slots."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.core.ledger import Delivery
from flwr_hetero.core.resharding import chunk


class Foreign(NamedTuple):
    """Another device's sample in one of our slots.

    Attributes
    ----------
    version : int
        The swap that brought it.
    content : bytes
        The sample.

    Examples
    --------
    >>> shard = Shard()
    >>> _ = shard.receive(Delivery([3], [1], [3], b"B0"))
    >>> shard.foreign[3] == Foreign(version=1, content=b"B0")
    True
    """

    version: int
    content: bytes


class Shard:
    """What a device received, and what it still wants to offer.

    Attributes
    ----------
    foreign : dict of int to Foreign
        All that was ever received, by slot.
    held : dict of int to bytes
        Of these what counts by the last delivery: slot to another device's sample.
    plan : int
        The plan that the queue belongs to; 0 for none yet.
    queue : list of int
        Slots to offer in this plan.

    Examples
    --------
    >>> shard = Shard()
    >>> shard.receive(Delivery([3], [1], [3], b"B0"))
    ([3], [])
    >>> shard.held
    {3: b'B0'}
    >>> Shard().receive(Delivery([3], [1], [], b""))  # lost its state: must not use slot 3
    ([], [3])
    """

    def __init__(self) -> None:
        self.foreign: dict[int, Foreign] = {}
        self.held: dict[int, bytes] = {}
        self.plan = 0
        self.queue: list[int] = []

    def receive(self, delivery: Delivery) -> tuple[list[int], list[int]]:
        """Take over what the server says we hold; doing it twice changes nothing.

        Parameters
        ----------
        delivery : Delivery
            From the server.

        Returns
        -------
        fresh : list of int
            Slots whose content is new.
        missing : list of int
            Slots that another device's sample belongs in which we do not have: our own sample
            of that slot is elsewhere by now, so neither may be trained on.

        Raises
        ------
        ValueError
            If the delivery does not fit together; the shard is then unchanged.
        """
        versions = dict(zip(delivery.slots, delivery.versions, strict=True))
        size = len(delivery.content) // max(len(delivery.sent), 1)
        fits = size * len(delivery.sent) == len(delivery.content) and bool(
            size or not delivery.sent
        )
        if not fits or set(delivery.sent) - set(versions):
            raise ValueError("the delivery's slots and content do not fit together.")
        fresh = []
        for place, slot in enumerate(delivery.sent):
            new = Foreign(versions[slot], delivery.content[place * size : (place + 1) * size])
            if self.foreign.get(slot) != new:
                self.foreign[slot] = new
                fresh.append(slot)
        self.held = {
            slot: foreign.content
            for slot, foreign in self.foreign.items()
            if foreign.version == versions.get(slot)
        }
        return fresh, [slot for slot in delivery.slots if slot not in self.held]

    def offers(self, received: int, sample_bytes: int, budget_bytes: int) -> list[int]:
        """Continue the plan's queue where the server's receipt says it stopped.

        Parameters
        ----------
        received : int
            Offers of this plan that the server has taken.
        sample_bytes, budget_bytes : int
            Size of a sample, and of what may be sent this round.

        Returns
        -------
        list of int
            Slots to offer now.
        """
        return chunk(self.queue[max(received, 0) :], sample_bytes, budget_bytes)[0]

    def state(self) -> dict[str, NDArray[np.generic] | int]:
        """Return all that is needed to continue, flat."""
        slots = sorted(self.foreign)
        content = b"".join(self.foreign[slot].content for slot in slots)
        return {
            "slots": np.array(slots, dtype=np.int64),
            "versions": np.array([self.foreign[slot].version for slot in slots], dtype=np.int64),
            "content": np.frombuffer(content, np.uint8).copy(),
            "plan": self.plan,
            "queue": np.array(self.queue, dtype=np.int64),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any] | None) -> "Shard":
        """Restore a shard; a lost or damaged state gives an empty one, which the server refills.

        Parameters
        ----------
        state : dict or None
            From :meth:`state`.

        Returns
        -------
        Shard
            Never partly restored.
        """
        shard = cls()
        if state is None:
            return shard
        try:
            slots = [int(slot) for slot in state["slots"]]
            versions = [int(version) for version in state["versions"]]
            content = np.asarray(state["content"], np.uint8).tobytes()
            queue = [int(slot) for slot in state["queue"]]
            plan = int(state["plan"])
            shard.receive(Delivery(slots, versions, slots, content))
        except (KeyError, TypeError, ValueError):
            return cls()
        shard.plan, shard.queue = plan, queue
        return shard


def pack(inputs: NDArray[np.float32], targets: NDArray[np.int64]) -> bytes:
    """Write samples for the wire, one after the other, all of one size.

    Parameters
    ----------
    inputs : ndarray of float32, shape (n, ...)
        Inputs.
    targets : ndarray of int64, shape (n,)
        Labels.

    Returns
    -------
    bytes
        Per sample its input as little-endian float32, then its label as int64.

    Examples
    --------
    >>> len(pack(np.zeros((2, 3), np.float32), np.zeros(2, np.int64)))
    40
    """
    width = int(np.prod(inputs.shape[1:]))
    rows = np.ascontiguousarray(inputs, dtype="<f4").reshape(len(inputs), width).view(np.uint8)
    labels = np.ascontiguousarray(targets, dtype="<i8").reshape(-1, 1).view(np.uint8)
    return np.hstack([rows, labels]).tobytes()


def unpack(
    content: bytes, shape: tuple[int, ...], num_classes: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Read what :func:`pack` wrote.

    Parameters
    ----------
    content : bytes
        Samples.
    shape : tuple of int
        Of one input.
    num_classes : int
        Labels must lie below it.

    Returns
    -------
    inputs : ndarray of float32, shape (n, *shape)
        Inputs.
    targets : ndarray of int64, shape (n,)
        Labels.

    Raises
    ------
    ValueError
        If the bytes are no such samples.

    Examples
    --------
    >>> unpack(pack(np.ones((1, 2), np.float32), np.array([4])), (2,), 10)
    (array([[1., 1.]], dtype=float32), array([4]))
    """
    width = 4 * int(np.prod(shape))
    if len(content) % (width + 8):
        raise ValueError(f"{len(content)} bytes are no samples of {width + 8} bytes.")
    rows = np.frombuffer(content, np.uint8).reshape(-1, width + 8)
    inputs = rows[:, :width].copy().view("<f4").astype(np.float32).reshape(-1, *shape)
    targets = rows[:, width:].copy().view("<i8").astype(np.int64).reshape(-1)
    if not np.isfinite(inputs).all() or ((targets < 0) | (targets >= num_classes)).any():
        raise ValueError("a sample holds NaN, infinity or an unknown label.")
    return inputs, targets

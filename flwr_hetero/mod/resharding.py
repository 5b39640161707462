"""A node's side of a resharding: take in others' samples, offer one's own (Mercury)."""

from collections.abc import Callable

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.core.shard import Shard
from flwr_hetero.mod.state import load_state, save_state
from flwr_hetero.resharding_records import ints_to_bytes, read_delivery, value_in


class NodeShard:
    """The samples a node holds in a run with resharding, for one message.

    **Raw samples leave the device through this class.** It does so only when the server runs
    the ``Resharding`` strategy and the ClientApp calls :meth:`close`.

    Parameters
    ----------
    record : ConfigRecord
        From the instruction.
    shard : Shard
        What the node holds so far.

    Attributes
    ----------
    held : dict of int to bytes
        Slot to the sample of another node that belongs there.
    fresh : list of int
        Slots that just got another sample.
    missing : list of int
        Slots not to be trained on, see :meth:`~flwr_hetero.core.shard.Shard.receive`.
    """

    def __init__(self, record: ConfigRecord, shard: Shard) -> None:
        self.record, self.shard = record, shard
        self.fresh, self.missing = shard.receive(read_delivery(record))
        self.held = shard.held

    @classmethod
    def open(cls, message: Message, context: Context) -> "NodeShard | None":
        """Take in what an instruction delivers.

        Parameters
        ----------
        message : Message
            The instruction.
        context : Context
            Holds the node's shard.

        Returns
        -------
        NodeShard or None
            None if the server does not reshard.

        Raises
        ------
        ValueError
            If the record is damaged.
        """
        record = message.content.config_records.get(keys.RESHARDING)
        if record is None:
            return None
        return cls(record, Shard.from_state(load_state(context, "shard")))

    def offers(
        self,
        num_samples: int,
        sample_bytes: int,
        choose: Callable[[int, bool], NDArray[np.int64] | None],
    ) -> list[int]:
        """Name the slots to offer with this reply.

        Parameters
        ----------
        num_samples : int
            Samples the node holds.
        sample_bytes : int
            Size of one on the wire.
        choose : callable
            Called as ``choose(num_offers, by_importance)`` when a new plan begins; returns
            slots, the first to be offered first, or None to be asked again with the next
            message, for instance because little is known of importance yet.

        Returns
        -------
        list of int
            What fits into the budget, from where the server says it stopped.
        """
        plan = value_in(self.record, keys.PLAN, int)
        if self.shard.plan != plan:
            count = int(np.ceil(value_in(self.record, keys.SHARE, float) * num_samples))
            chosen = choose(
                min(count, num_samples), value_in(self.record, keys.BY_IMPORTANCE, bool)
            )
            if chosen is None:
                return []
            self.shard.plan, self.shard.queue = plan, chosen.tolist()
        received = value_in(self.record, keys.RECEIVED, int)
        return self.shard.offers(received, sample_bytes, value_in(self.record, keys.BUDGET, int))

    def close(self, reply: Message, context: Context, slots: list[int], content: bytes) -> None:
        """Put the offered samples into the reply and keep the shard.

        Parameters
        ----------
        reply : Message
            Gets a ``flwr-hetero.resharding`` record.
        context : Context
            Keeps the shard until the next message.
        slots : list of int
            From :meth:`offers`.
        content : bytes
            Their samples, one after the other.
        """
        save_state(context, "shard", self.shard.state())
        reply.content[keys.RESHARDING] = ConfigRecord(
            {
                keys.PLAN: self.shard.plan,
                keys.SLOTS: ints_to_bytes(slots),
                keys.MISSING: ints_to_bytes(self.missing),
                keys.CONTENT: content,
            }
        )

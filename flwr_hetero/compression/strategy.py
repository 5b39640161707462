"""The server's part of compression: a wrapper, and the grid that packs what is sent."""

from logging import WARNING
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero import keys
from flwr_hetero._flwr import CLIENT_APP_RAISED, clips_on_nodes, log, trains_trees
from flwr_hetero.client.carried import MOST_BYTES
from flwr_hetero.compression import wire
from flwr_hetero.compression.algorithm import BITS
from flwr_hetero.errors import check_choice, invalid
from flwr_hetero.exchange.nodes import TranslatingGrid
from flwr_hetero.records import arrays_in, num_parameters, payload_bytes
from flwr_hetero.server.client_support import MAX_NAMES, MOD_LINES
from flwr_hetero.server.loop import Rounds, Run
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import StateDict


class Compressed(Wrapper):
    """Send models and updates in few bits, and train as with whole ones.

    A message is packed where it is sent: all other wrappers see whole models. The node trains from
    the model as it reads it and replies with its update. What rounding loses is added to its next
    one. Nodes need the mod ``hetero``. Those without it exchange whole models, and the log names
    them once. ValueError for a setting out of range, for boosted trees, or for clipping on nodes
    with ``error_feedback``.

    >>> strategy = Compressed(bits_up=4, bits_down=4)

    Parameters
    ----------
    strategy : Strategy, optional
        What trains: any Flower strategy or wrapper, such as ``FedSlice()``; FedAvg if left out.
    bits_up, bits_down : {2, 3, 4, 8, None}
        Bits of a value in an update, and in a model that is sent; a quarter of a bit comes on top.
        None: as it is.
    error_feedback : bool
        Each node keeps what its last update has lost, an array as large as the model, and adds it
        to the next one. Without, an update is never longer than the node's own.

    Notes
    -----
    Arrays of integers, those below 256 values and the statistics of batch normalisation are sent as
    they are. The first model that a fleet is sent is whole, until replies show that nodes have the
    mod. An unknown node gets what most known nodes can read.
    """

    name: ClassVar[str] = "compressed"
    decides = frozenset({"compression"})
    outside_of = frozenset({"loop"})

    def __init__(
        self,
        strategy: Strategy | None = None,
        bits_up: int | None = 4,
        bits_down: int | None = 4,
        *,
        error_feedback: bool = True,
    ) -> None:
        for name, bits in (("bits_up", bits_up), ("bits_down", bits_down)):
            check_choice(name, bits, (*BITS, None))
        check_choice("error_feedback", error_feedback, (True, False))
        super().__init__(strategy)
        self.bits_up = bits_up
        self.bits_down = bits_down
        self.error_feedback = error_feedback
        if trains_trees(self.leaf):
            rule = "train by gradient steps inside Compressed: trees have no values to round"
            raise invalid("strategy", type(self.leaf).__name__, rule)
        clips = [type(each).__name__ for each in self.chain() if clips_on_nodes(each)]
        if clips and bits_up is not None and error_feedback:
            rule = f"be False around {clips[0]}, or updates are longer than they were clipped to"
            raise invalid("error_feedback", error_feedback, rule)
        # Nodes that have shown by a reply that they have the mod, or have not.
        self.with_mod: set[int] = set()
        self.without_mod: set[int] = set()
        # Nodes that have failed before anything was known of them.
        self.in_doubt: set[int] = set()
        self._most_have = False
        self._told = False
        self._grid: PackingGrid | None = None

    def make_rounds(self, run: Run) -> Rounds:
        """Return the wrapped strategy's rounds, on a grid that packs."""
        # It is the same grid again, because a run may continue what the last one has left.
        if self._grid is None or self._grid.grid is not run.grid:
            self._grid = PackingGrid(run.grid, self)
        run.grid = self._grid
        return super().make_rounds(run)

    # --- what the grid asks --------------------------------------------------------------
    def reads(self, node_id: int) -> bool:
        """Return whether a node reads packed models, as far as that is known."""
        if node_id in self.with_mod or node_id in self.without_mod:
            return node_id in self.with_mod
        return self.most_have and node_id not in self.in_doubt

    @property
    def most_have(self) -> bool:
        """Whether most of the nodes that are known have the mod."""
        if not (self.with_mod or self.without_mod):
            return self._most_have
        return len(self.with_mod) > len(self.without_mod)

    # --- hooks ---------------------------------------------------------------------------
    def on_start(self, run: Run) -> None:
        """Say if the model is too large for nodes to keep what its updates lose."""
        lost_bytes = 4 * num_parameters(run.arrays)
        if self.bits_up is not None and self.error_feedback and lost_bytes > MOST_BYTES:
            text = "Compressed: no error feedback. It would be %.1f GB of a node's state, and %.1f "
            log(WARNING, text + "are kept at most", lost_bytes / 1e9, MOST_BYTES / 1e9)

    def round_info(self) -> dict[str, Any]:
        """Return how many nodes get and send whole models, as they have no mod."""
        return {"without_mod": len(self.without_mod)}

    def on_round_end(self, run: Run, record: dict[str, Any]) -> None:
        """Say once which nodes have no mod."""
        if self.without_mod and not self._told:
            self._told = True
            names = sorted(map(self.identity, self.without_mod))
            shown = ", ".join(names[:MAX_NAMES])
            text = "%d of %d nodes reply without the mod and exchange whole models: %s. Add:\n%s"
            total = len(self.with_mod) + len(names)
            log(WARNING, text, len(names), total, shown, MOD_LINES)

    def state_dict(self) -> StateDict:
        """Return whether most nodes have the mod."""
        return {"most_have": self.most_have}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        self._most_have = bool(state["most_have"])


class PackingGrid(TranslatingGrid):
    """Pack the models of instructions, and make whole models of the updates in replies."""

    def __init__(self, grid: Grid, owner: Compressed) -> None:
        super().__init__(grid)
        self.owner = owner
        # A message is kept as long as anybody waits for its reply.
        self._sent: WeakValueDictionary[str, Message] = WeakValueDictionary()
        # A model that many nodes are sent is packed once.
        self._last: tuple[ArrayRecord, ArrayRecord] | None = None

    def write(self, message: Message) -> Message:
        """Pack the models of an instruction (l. 1) for a node that reads them."""
        if not arrays_in(message.content):
            return message
        content = RecordDict({**message.content})
        owner = self.owner
        if owner.bits_down is not None and owner.reads(message.metadata.dst_node_id):
            for name, arrays in arrays_in(message.content).items():
                content[name] = self._pack(arrays, owner.bits_down)
        asked = {keys.BITS_UP: owner.bits_up or 0, keys.FEEDBACK: owner.error_feedback}
        content[keys.COMPRESSION] = ConfigRecord(asked)  # type: ignore[arg-type]
        return Message(content, metadata=message.metadata)  # type: ignore[call-overload,no-any-return]

    def _pack(self, arrays: ArrayRecord, bits: int) -> ArrayRecord:
        if self._last is None or self._last[0] is not arrays:
            self._last = arrays, wire.packed(arrays, bits)
        return self._last[1]

    def sent(self, message: Message, written: Message) -> None:
        """Keep what the node was sent, for the reply."""
        if written is not message:
            self._sent[message.metadata.message_id] = message
            self._note(written)

    def read(self, reply: Message) -> Message:
        """Add an update to the model that its node was sent (l. 5); a bad one becomes an error."""
        metadata = reply.metadata
        owner = self.owner
        sent = self._sent.pop(metadata.reply_to_message_id, None)
        if sent is None:
            return reply
        node_id = sent.metadata.dst_node_id
        if reply.has_error():
            # A node that nothing is known of may have failed to read its model.
            is_known = node_id in owner.with_mod or node_id in owner.without_mod
            if not is_known and reply.error.code == CLIENT_APP_RAISED:
                owner.in_doubt.add(node_id)
            return reply
        has_mod = keys.COMPRESSION in reply.content
        (owner.with_mod if has_mod else owner.without_mod).add(node_id)
        (owner.without_mod if has_mod else owner.with_mod).discard(node_id)
        content = RecordDict({**reply.content})
        content.pop(keys.COMPRESSION, None)
        body: Any = content
        models = list(arrays_in(content).items())
        # The checks of replies refuse several models.
        if len(models) == len(arrays_in(sent.content)) == 1:
            ((name, arrays),) = models
            (start,) = arrays_in(sent.content).values()
            try:
                content[name] = wire.restored(arrays, start, owner.bits_up)
            except ValueError as error:
                body = Error(CLIENT_APP_RAISED, str(error))
        self._note(reply)
        return Message(body, metadata=metadata)  # type: ignore[call-overload,no-any-return]

    def _note(self, message: Message) -> None:
        """Count the bytes of a message as it is on the wire."""
        ids = message.metadata.message_id, message.metadata.reply_to_message_id
        self.owner.fleet.costs.on_wire[ids] = payload_bytes(message.content)

"""CD-GraB: the server finds for each node an order of its data that goes with the others'."""

from logging import INFO, WARNING
from typing import Any, ClassVar

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero import keys
from flwr_hetero._flwr import log
from flwr_hetero.cd_grab.order_server import Balance, OrderServer
from flwr_hetero.cd_grab.wire import (
    MAX_COUNT,
    MAX_UNITS,
    Report,
    Terms,
    read_report,
    usual_length,
    write_instruction,
)
from flwr_hetero.errors import check_choice, check_count, invalid
from flwr_hetero.records import config_of, payload_bytes
from flwr_hetero.server.client_support import STEPS, ClientSupport
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.profiling import identify_nodes
from flwr_hetero.server.rounds import Run
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import StateDict, check_state

ORDERS = ClientSupport(
    keys.ORDER,
    "what it saw of its order",
    "    from flwr_hetero.mod import hetero\n"
    "    from flwr_hetero.sampler import OrderedSampler\n"
    "    app = ClientApp(mods=[hetero])  # adds to the reply what the sampler has to say\n"
    "    loader = hetero.batches(loader, msg, sampler=OrderedSampler, model=model)\n"
    "    criterion = loader.criterion()  # in place of the loss function",
    "which stay with their own order",
)
"""What nodes must do."""


class CDGraB(Wrapper):
    """Serve orders to nodes that train with an :class:`~flwr_hetero.sampler.OrderedSampler`.

    Each instruction says how the node's order goes on; each reply brings the differences of the
    pairs of units that the node has visited, as sketches or whole. Nodes without such a sampler
    take part unchanged. Cooper et al., NeurIPS 2023, Algorithms 3 and 4.

    Parameters
    ----------
    strategy : Strategy, optional
        What aggregates: any Flower strategy, or another wrapper; FedAvg if left out.
    mode : {"sketched", "exact"}
        ``sketched``: any number of local steps a round, one short sketch per pair. ``exact``: one
        step a round and whole gradients, Algorithms 3 and 4 of the paper to the letter as long
        as all nodes take part.
    sketch_size : int
        Numbers k in a sketch, two bytes each; 256 has most of the gain of 1024, 16 has none.
    num_units : int, optional
        Units in every node's order. Only nodes with equally long orders are balanced together:
        set it where nodes hold unequal amounts of data, and their batches will be unequal
        instead. None: each node's own choice.
    seed : int
        Seed of the sketch.

    Raises
    ------
    ValueError
        If a setting is out of range.
    MissingClientSupportError
        In the first round, if no node reports on its order.

    Notes
    -----
    The paper leaves partial participation out. Here the sign balances a mix of the global sum and
    the node's own sum; the own-sum weight is 0 for a fixed group and 1 for a node balanced alone
    (:func:`~flwr_hetero.cd_grab.algorithm.own_share`; ``own_share`` in the history). Above 0.8, as
    with a few nodes drawn at random each round, this has nothing over
    ``OrderedSampler(method="id-grab")``, which sends nothing. A pair weighs as much as its node's
    model.

    A resumed run equals an unbroken one if nodes keep their state; a node that lost it gets its
    order again, and begins where the server's signs end.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAdam
    >>> strategy = CDGraB(FedAdam(), num_units=64)
    """

    name: ClassVar[str] = "cd_grab"
    decides = frozenset({"orders"})
    client_support: tuple[ClientSupport, ...] = (ORDERS,)
    only_rounds = "nodes balance pairs on their own there: OrderedSampler(method='id-grab')"

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        mode: str = "sketched",
        sketch_size: int = 1024,
        num_units: int | None = None,
        seed: int = 0,
    ) -> None:
        self.exact = check_choice("mode", mode, ("sketched", "exact")) == "exact"
        sketch_size = check_count("sketch_size", sketch_size, 1)
        if num_units is not None and check_count("num_units", num_units, 2) > MAX_UNITS:
            raise invalid("num_units", num_units, f"be at most {MAX_UNITS}")
        if check_count("seed", seed) > MAX_COUNT:
            raise invalid("seed", seed, f"be at most {MAX_COUNT}")
        if self.exact:
            self.decides = self.decides | {"steps"}
            self.client_support = ORDERS, STEPS
        super().__init__(strategy)
        self.server = OrderServer(exact=self.exact)
        self.terms = Terms(0, 0 if self.exact else sketch_size, seed, num_units or 0)
        self._names: dict[int, str] = {}
        self._reports: dict[str, Report] = {}  # by message, from when it is judged
        self._dim = 0
        self._balance, self._bytes = Balance(), {"bytes_down": 0, "bytes_up": 0}

    def on_start(self, run: Run) -> None:
        """After a resume, find out which nodes the orders belong to."""
        if self.server.states:
            identify_nodes(self, run.exchange(run.round + 1), run.grid, run.timeout_s)

    def on_instructions(
        self, context: Exchange, messages: list[Message], grid: Grid
    ) -> list[Message]:
        """Tell each node which order it should be at (Alg. 4, l. 15)."""
        self.terms = self.terms._replace(server_round=context.round)
        self._names, self._reports = {}, {}
        self._bytes = {"bytes_down": 0, "bytes_up": 0}
        for message in messages:
            node_id = message.metadata.dst_node_id
            self._names[node_id] = self.identity(node_id)
            # Alg. 4, l. 15
            answer = self.server.answer(self._names[node_id])
            record = ConfigRecord(write_instruction(self.terms, answer))  # type: ignore[arg-type]
            message.content[keys.ORDER] = record
            self._bytes["bytes_down"] += payload_bytes(RecordDict({keys.ORDER: record}))
            # one step a round: the models of a round are all at the same weights
            if self.exact:
                config_of(message)[keys.NUM_STEPS] = 1
        return messages

    def why_bad(self, context: Exchange, reply: Message) -> str | None:
        """Read the pairs in a reply (Alg. 4, l. 5); return why they cannot be balanced."""
        if (record := reply.content.config_records.get(keys.ORDER)) is not None:
            try:
                self._reports[reply.metadata.reply_to_message_id] = read_report(record, self.terms)
            except ValueError as error:
                return f"order record: {error}"
        return None

    def on_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Take the pairs out of the replies and balance them (Alg. 4, l. 8-14)."""
        reports: dict[int, Report] = {}
        for reply in replies:
            node_id = reply.metadata.src_node_id
            record = reply.content.config_records.get(keys.ORDER)
            if record is None:
                continue
            del reply.content[keys.ORDER]
            self._bytes["bytes_up"] += payload_bytes(RecordDict({keys.ORDER: record}))
            name, before = self.identity(node_id), self._names.get(node_id, "")
            # its identity became known by this reply
            if name != before:
                self.server.rename(before, name)
            reports[node_id] = self._reports.pop(reply.metadata.reply_to_message_id)
        bad = self._of_other_lengths(reports)
        good = []
        for reply in replies:
            if reason := bad.get(reply.metadata.src_node_id):
                context.drop(reply, f"order record: {reason}")
            else:
                good.append(reply)
        # l. 8-14
        self._balance = self.server.receive(self._weighted(context, good, reports))
        return good

    def _of_other_lengths(self, reports: dict[int, Report]) -> dict[int, str]:
        """Find nodes whose vectors are not as long as those of the others."""
        lengths = {node: r.diffs.shape[1] for node, r in reports.items() if len(r.diffs)}
        usual = usual_length(lengths.values(), self._dim)
        if self._dim not in (0, usual):
            log(WARNING, "CD-GraB: vectors of %d numbers, not %d: restart", usual, self._dim)
            self.server.states = {}
        self._dim = usual
        return {
            node: f"vectors of {length} numbers instead of {usual}"
            for node, length in lengths.items()
            if length != usual
        }

    def _weighted(
        self, context: Exchange, replies: list[Message], reports: dict[int, Report]
    ) -> dict[str, Report]:
        """Scale each node's pairs as its model counts in the mean; name the nodes."""
        ordered = [reply for reply in replies if reply.metadata.src_node_id in reports]
        weights = self.top.weights(context, ordered)
        usual = sum(weights) / len(weights) if any(weights) else 1.0
        result = {}
        for reply, weight in zip(ordered, weights, strict=True):
            report = reports[reply.metadata.src_node_id]
            if weight != usual:
                report = report._replace(diffs=weight / usual * report.diffs)
            result[self.identity(reply.metadata.src_node_id)] = report
        return result

    def round_info(self) -> dict[str, Any]:
        """Return what was balanced this round, and the bytes that it took."""
        return self._balance._asdict() | self._bytes

    def state_dict(self) -> StateDict:
        """Return all orders and what was seen of them."""
        return self.server.state_dict() | {"dim": self._dim}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        check_state(state, {"dim": int}, "CDGraB")
        self.server.load_state_dict(state)
        self._dim = int(state["dim"])

    def summary(self) -> None:
        """Log the mode and the wrapped strategy's settings."""
        size = self.terms.sketch_size
        how = f"sketches of {size} numbers" if size else "one step a round, whole gradients"
        log(INFO, "\t├──> CD-GraB: %s, units: %s", how, self.terms.num_units or "each node's own")
        super().summary()

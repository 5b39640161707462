"""The paper's own setting: one data set that all nodes see, and a server that ranks its samples."""

from collections.abc import Sequence

import numpy as np
from flwr.app import ConfigRecord, Message
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.biased_local_sgd import algorithm
from flwr_hetero.biased_local_sgd.algorithm import Indices, epoch_sizes
from flwr_hetero.errors import check_count
from flwr_hetero.exchange.context import Messages
from flwr_hetero.records import configs_in
from flwr_hetero.state_dict import StateDict, check_state, rng_from_str, rng_to_str

NONE: Indices = np.empty(0, np.int64)


def samples_record(indices: Indices, losses: NDArray[np.float32] | None = None) -> ConfigRecord:
    """Pack indices, and losses if there are any, for the wire."""
    record = ConfigRecord({keys.INDICES: np.asarray(indices, "<i4").tobytes()})
    if losses is not None:
        record[keys.LOSSES] = np.asarray(losses, "<f4").tobytes()
    return record


def read_samples(record: ConfigRecord) -> tuple[Indices, NDArray[np.float32]]:
    """Unpack what :func:`samples_record` packed; ValueError for anything else."""
    lists = [record.get(keys.INDICES), record.get(keys.LOSSES, b"")]
    if not all(isinstance(packed, bytes) for packed in lists):
        raise ValueError("no list of samples")
    indices = np.frombuffer(lists[0], "<i4")  # type: ignore[arg-type]
    losses = np.frombuffer(lists[1], "<f4")  # type: ignore[arg-type]
    return indices.astype(np.int64), losses.astype(np.float32)


class SharedSamples:
    """Assign the samples of a data set to nodes, fast and slow, out of two pools."""

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        high_loss_fraction: float | None,
        share: float | None = None,
        unified: bool = False,
        seed: int = 0,
    ) -> None:
        num_samples = check_count("shared_samples", num_samples, 1)
        self.batch_size = check_count("batch_size", batch_size, 1)
        self.high_loss_fraction = high_loss_fraction
        self.share = share
        self.unified = unified
        self.losses = np.full(num_samples, np.nan, np.float32)
        self.rng = np.random.default_rng(seed)
        # What is left of an epoch's samples: those chosen by loss, and the others.
        self._pools: dict[bool, Indices] = dict.fromkeys((True, False), NONE)
        self._taken = NONE
        self._assigned: dict[int, Indices] = {}

    def assign(self, messages: Messages, num_steps: Sequence[int], fast: Sequence[bool]) -> None:
        """Add the samples of its node to each instruction."""
        self._assigned = {}
        for message, indices in zip(messages, self.draw(num_steps, fast), strict=True):
            message.content[keys.SAMPLES] = samples_record(indices)
            self._assigned[message.metadata.dst_node_id] = indices

    def draw(self, num_steps: Sequence[int], fast: Sequence[bool]) -> list[Indices]:
        """Take the samples of a round's steps out of the pools, node by node."""
        if not num_steps:
            return []
        # N_F and N_S follow from the steps of this round
        by_loss = [is_fast and self.high_loss_fraction is not None for is_fast in fast]
        given = self.share if any(by_loss) else None
        share = given or algorithm.fast_share(num_steps, by_loss)
        pools = zip(num_steps, by_loss, strict=True)
        return [self._take(steps * self.batch_size, pool, share) for steps, pool in pools]

    def _take(self, count: int, by_loss: bool, share: float) -> Indices:
        indices = NONE
        draw = self._draw_fast if by_loss else self._draw_slow
        while (missing := count - len(indices)) > 0:
            left = self._pools[by_loss]
            pool = left if len(left) else draw(share)
            self._pools[by_loss] = pool[missing:]
            indices = np.concatenate([indices, pool[:missing]])
        return indices

    def _draw_fast(self, share: float) -> Indices:
        # Alg. 1, l. 2: an epoch begins
        num_fast, _ = epoch_sizes(len(self.losses), share)
        # l. 3 to 5
        fraction = self.high_loss_fraction or 0.0
        self._taken = algorithm.fast_allocation(self.losses, num_fast, fraction, self.rng)
        if self.unified:
            # What the slow nodes had left may now belong to the fast nodes.
            self._pools[False] = NONE
        return self._taken

    def _draw_slow(self, share: float) -> Indices:
        # l. 6; with share=1 there would be none
        num_slow = max(1, epoch_sizes(len(self.losses), share)[1])
        taken = self._taken if self.unified and len(self._taken) < len(self.losses) else None
        return algorithm.slow_allocation(len(self.losses), num_slow, self.rng, taken)

    def why_bad(self, reply: Message) -> str | None:
        """Return why the losses of a reply cannot be right."""
        record = configs_in(reply.content).get(keys.SAMPLES)
        assigned = self._assigned.get(reply.metadata.src_node_id)
        if record is None or assigned is None:
            return None
        try:
            indices, losses = read_samples(record)
        except ValueError as error:
            return str(error)
        if indices.shape != losses.shape or not np.isfinite(losses).all():
            return "losses are not finite, one per sample"
        if not np.isin(indices, assigned).all():
            return "losses of samples that it was not assigned"
        return None

    def record(self, replies: Sequence[Message]) -> None:
        """Keep the losses of good replies."""
        for reply in replies:
            record = configs_in(reply.content).get(keys.SAMPLES)
            if record is not None and reply.metadata.src_node_id in self._assigned:
                indices, losses = read_samples(record)
                self.losses[indices] = losses

    def state_dict(self) -> StateDict:
        """Return losses, pools and generator."""
        pools = {"fast": self._pools[True], "slow": self._pools[False], "taken": self._taken}
        return {"losses": self.losses.copy(), **pools, "rng": rng_to_str(self.rng)}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        # The losses are of another data set.
        check_state(state, {"losses": (self.losses.shape, "f")}, "SharedSamples")
        self.losses = np.array(state["losses"])
        self._pools[True], self._pools[False], self._taken = (
            np.asarray(state[name], np.int64) for name in ("fast", "slow", "taken")
        )
        self.rng = rng_from_str(str(state["rng"]))

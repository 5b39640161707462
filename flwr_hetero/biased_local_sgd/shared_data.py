"""Lists of samples and their losses on the wire (shared-data mode of biased local SGD)."""

from collections.abc import Sequence

import numpy as np
from flwr.app import ConfigRecord
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.biased_local_sgd.algorithm import (
    Indices,
    epoch_sizes,
    fast_allocation,
    fast_share,
    record_losses,
    slow_allocation,
)
from flwr_hetero.errors import check_count, invalid
from flwr_hetero.state_dict import StateDict, rng_from_str, rng_to_str


def samples_record(indices: Indices, losses: NDArray[np.float32] | None = None) -> ConfigRecord:
    """Pack indices, and losses if there are any, for the wire."""
    record = ConfigRecord({keys.INDICES: np.asarray(indices, "<i4").tobytes()})
    if losses is not None:
        record[keys.LOSSES] = np.asarray(losses, "<f4").tobytes()
    return record


def read_samples(record: ConfigRecord) -> tuple[Indices, NDArray[np.float32]]:
    """Unpack what :func:`samples_record` packed."""
    try:
        indices = np.frombuffer(record[keys.INDICES], "<i4")  # type: ignore[arg-type]
        losses = np.frombuffer(record.get(keys.LOSSES, b""), "<f4")  # type: ignore[arg-type]
    except (KeyError, TypeError) as error:
        raise ValueError(f"no list of samples: {error}") from error
    return indices.astype(np.int64), losses.astype(np.float32)


class SharedSamples:
    """Hand out the samples of one data set that all nodes see (Algorithm 1).

    Each round every node gets the samples for its steps, the fast nodes from one pool and the
    slow nodes from another. A pool that runs out is drawn anew; with the fast nodes' pool an
    epoch begins.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        high_loss_fraction: float | None,
        *,
        share: float | None = None,
        unified: bool = False,
        seed: int = 0,
    ) -> None:
        for name, value in (("num_samples", num_samples), ("batch_size", batch_size)):
            check_count(name, value, 1, "it is that of the shared data set")
        check_count("seed", seed, 0, "any such number will do")
        self.batch_size, self.high_loss_fraction = batch_size, high_loss_fraction
        self.share, self.unified = share, unified
        self.losses = np.full(num_samples, np.nan, np.float32)
        self.epoch = 0
        self.rng = np.random.default_rng(seed)
        self._fast = self._slow = self._taken = np.empty(0, np.int64)

    def hand_out(self, num_steps: Sequence[int], fast: Sequence[bool]) -> list[Indices]:
        """Take a round's samples out of the pools."""
        by_loss = [bool(is_fast) and self.high_loss_fraction is not None for is_fast in fast]
        share = self.share if self.share and any(by_loss) else fast_share(num_steps, by_loss)
        return [
            self._take(steps * self.batch_size, is_fast, share)
            for steps, is_fast in zip(num_steps, by_loss, strict=True)
        ]

    def _take(self, count: int, by_loss: bool, share: float) -> Indices:
        taken: list[Indices] = []
        while count:
            pool = self._fast if by_loss else self._slow
            if not len(pool):
                pool = self._draw_fast(share) if by_loss else self._draw_slow(share)
            taken.append(pool[:count])
            count -= len(taken[-1])
            if by_loss:
                self._fast = pool[len(taken[-1]) :]
            else:
                self._slow = pool[len(taken[-1]) :]
        return np.concatenate(taken)

    def _draw_fast(self, share: float) -> Indices:
        fraction = 1.0 if self.high_loss_fraction is None else self.high_loss_fraction
        num_fast, _ = epoch_sizes(len(self.losses), share)
        self._taken = fast_allocation(self.losses, num_fast, fraction, self.rng)
        self.epoch += 1
        if self.unified:
            self._slow = np.empty(0, np.int64)
        return self._taken

    def _draw_slow(self, share: float) -> Indices:
        _, num_slow = epoch_sizes(len(self.losses), share)
        taken = self._taken if self.unified and len(self._taken) < len(self.losses) else None
        return slow_allocation(len(self.losses), num_slow, self.rng, taken)

    def record(self, indices: Indices, losses: NDArray[np.float32]) -> None:
        """Keep the losses of processed samples; see ``record_losses`` for errors."""
        record_losses(self.losses, indices, losses)

    def state_dict(self) -> StateDict:
        """Return losses, pools and generator."""
        return {
            "losses": self.losses.copy(),
            "fast": self._fast.copy(),
            "slow": self._slow.copy(),
            "taken": self._taken.copy(),
            "epoch": self.epoch,
            "rng": rng_to_str(self.rng),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        losses = np.asarray(state["losses"], dtype=np.float32)
        if losses.shape != self.losses.shape:
            rule = f"have the size {self.losses.shape} of this data set"
            raise invalid("losses", losses.shape, rule, "resume with the same data")
        self.losses, self.epoch = losses, int(state["epoch"])
        self._fast = np.asarray(state["fast"], dtype=np.int64)
        self._slow = np.asarray(state["slow"], dtype=np.int64)
        self._taken = np.asarray(state["taken"], dtype=np.int64)
        self.rng = rng_from_str(str(state["rng"]))

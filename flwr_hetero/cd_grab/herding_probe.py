"""What a node adds for the measurement of the herding bound."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flwr_hetero import keys
from flwr_hetero.cd_grab.gradients import sketch_gradients
from flwr_hetero.cd_grab.wire import pack_vectors


class HerdingProbe:
    """Sketch every unit's gradient for a :class:`~flwr_hetero.strategy.HerdingMeter`.

    Parameters
    ----------
    instruction : mapping
        The ``HERDING`` record of a training instruction; without one the probe is off.

    Examples
    --------
    >>> import torch
    >>> probe = HerdingProbe({"sketch-size": 4, "sketch-seed": 0})
    >>> probe.see(torch.ones(2, 100))
    >>> len(probe.report(num_units=2)["vectors"])
    16
    >>> HerdingProbe({}).on
    False
    """

    def __init__(self, instruction: Mapping[str, Any]) -> None:
        self.on = bool(instruction)
        self._instruction = instruction
        self._seen: list[NDArray[np.floating]] = []

    def see(self, gradients: Tensor) -> None:
        """Take the gradients (num_units, dim) of a batch's units, in the order of the visit."""
        if self.on:
            size, seed = (self._instruction[key] for key in (keys.SKETCH_SIZE, keys.SKETCH_SEED))
            self._seen.append(sketch_gradients(gradients, size, seed))

    def report(self, num_units: int) -> dict[str, int | float | bytes]:
        """Return the ``HERDING`` record of the reply; empty if the probe is off."""
        if not self.on:
            return {}
        vectors = np.concatenate(self._seen) if self._seen else np.zeros((0, 0), np.float32)
        data, scale = pack_vectors(vectors)
        return {
            keys.NUM_UNITS: num_units,
            keys.SKETCH_SIZE: vectors.shape[1],
            keys.VECTORS: data,
            keys.SCALE: scale,
        }

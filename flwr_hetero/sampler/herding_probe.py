"""Note the gradients of the units that a node visits, small, to measure how good its order is."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flwr_hetero import keys
from flwr_hetero.core.order_wire import pack_vectors
from flwr_hetero.sampler.unit_gradients import sketch_gradients


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
        self._size = int(instruction.get(keys.SKETCH_SIZE, 0))
        self._seed = int(instruction.get(keys.SKETCH_SEED, 0))
        self._seen: list[NDArray[np.floating]] = []

    def see(self, gradients: Tensor) -> None:
        """Take the gradients of the units in a batch.

        Parameters
        ----------
        gradients : Tensor, shape (num_units, dim)
            In the order of the visit.
        """
        if self.on:
            self._seen.append(sketch_gradients(gradients, self._size, self._seed))

    def report(self, num_units: int) -> dict[str, int | float | bytes]:
        """Tell the meter what was seen.

        Parameters
        ----------
        num_units : int
            Units in a pass of this node.

        Returns
        -------
        dict
            For the ``HERDING`` record of the reply; empty if the probe is off.
        """
        if not self._seen:
            return {}
        vectors = np.concatenate(self._seen)
        packed = pack_vectors(vectors)
        return {
            keys.NUM_UNITS: num_units,
            keys.SKETCH_SIZE: vectors.shape[1],
            keys.VECTORS: packed.data,
            keys.SCALE: packed.scale,
        }

"""The sum of all examples' gradients, along which priorities count."""

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from flwr_hetero.state_dict import StateDict, check_state

Gradients = Mapping[str, Tensor | None]


class AggregatedGradient:
    r"""Keep :math:`\bar g`, one tensor per parameter, by Eq. 9.

    .. math:: \bar g \leftarrow (1 - n / N) \, \bar g + g_n

    The paper begins with a pass over all data. Here :math:`\bar g` may also begin at zero: the
    share of the data that it covers follows the same rule, and :attr:`direction` divides by it
    (Adam corrects its moments in the same way).
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], num_samples: int) -> None:
        self.parameters, self.num_samples = dict(parameters), num_samples
        self.total = {
            name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
            for name, p in self.parameters.items()
        }
        self.covered = 0.0

    @property
    def is_known(self) -> bool:
        """Whether any gradient came in yet."""
        return self.covered > 0.0

    @property
    def scale(self) -> float:
        """Factor from ``total`` to a sum over all N examples; 1 after some epochs."""
        return self.num_samples / self.covered if self.is_known else 1.0

    @property
    def direction(self) -> dict[str, Tensor]:
        """The aggregated gradient, a sum over N examples; zeros while nothing is known."""
        return {name: part * self.scale for name, part in self.total.items()}

    def to_device(self) -> None:
        """Move the sum to where the parameters are."""
        for name, parameter in self.parameters.items():
            self.total[name] = self.total[name].to(parameter.device)

    def absorb(self, num_new: int, gradients: Gradients) -> None:
        """Add the mean gradient of a batch (Alg. 1, l. 22)."""
        self.to_device()
        num_new = min(num_new, self.num_samples)
        keep = 1 - num_new / self.num_samples
        for name, total in self.total.items():
            total.mul_(keep)
            if (new := gradients[name]) is not None:
                total.add_(new, alpha=num_new)
        self.covered = keep * self.covered + num_new

    def state_dict(self) -> StateDict:
        """Return the sum and its cover as flat arrays and scalars."""
        arrays = {f"gradient.{n}": part.cpu().numpy().copy() for n, part in self.total.items()}
        return {**arrays, "gradient_covered": self.covered}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken."""
        shapes = {f"gradient.{n}": (tuple(p.shape), "f") for n, p in self.total.items()}
        check_state(state, shapes | {"gradient_covered": float}, "AggregatedGradient")
        arrays = [np.asarray(state[key]) for key in shapes]
        covered = cast(float, state["gradient_covered"])
        bounded = 0.0 <= covered <= self.num_samples * (1 + 1e-9)
        if not (bounded and all(np.isfinite(array).all() for array in arrays)):
            raise ValueError("state of AggregatedGradient must hold finite sums over the samples.")
        self.total = {
            name: torch.from_numpy(array.copy()).to(part)
            for (name, part), array in zip(self.total.items(), arrays, strict=True)
        }
        self.covered = covered

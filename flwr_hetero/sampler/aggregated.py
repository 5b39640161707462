"""PGD's aggregated gradient: the sum of all examples' gradients, kept up batch by batch."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from flwr_hetero.sampler.batches import StateDict

PREFIX = "gradient."


class AggregatedGradient:
    r"""Keep :math:`\bar g`, one tensor per parameter, by Eq. 9.

    .. math:: \bar g \leftarrow (1 - n / N) \, \bar g + g_n

    Parameters
    ----------
    parameters : mapping of str to nn.Parameter
        The parameters to follow; all of a model's, or its last layer's.
    num_samples : int
        Size N of the local data set.

    Notes
    -----
    The paper begins with a pass over all data. Here :math:`\bar g` may also begin at zero: the
    share of the data that has come in is counted by the same rule, and :attr:`direction`
    divides by it, so that its length is right from the first batch (Adam corrects its moments
    in the same way).

    Examples
    --------
    >>> model = nn.Linear(1, 1, bias=False)
    >>> gradient = AggregatedGradient(dict(model.named_parameters()), num_samples=4)
    >>> model.weight.grad = torch.tensor([[3.0]])  # mean over a batch of 2
    >>> gradient.absorb(num_new=2)
    >>> gradient.direction
    {'weight': tensor([[12.]])}
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], num_samples: int) -> None:
        self.parameters, self.num_samples = dict(parameters), num_samples
        self.total = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.covered = 0.0

    @property
    def is_known(self) -> bool:
        """Whether any gradient came in yet."""
        return self.covered > 0.0

    @property
    def scale(self) -> float:
        """What the sum must be multiplied by to stand for all N examples; 1 after some epochs."""
        return self.num_samples / self.covered if self.is_known else 1.0

    @property
    def direction(self) -> dict[str, Tensor]:
        """The aggregated gradient, a sum over N examples; zeros while nothing is known."""
        return {name: part * self.scale for name, part in self.total.items()}

    def to_device(self) -> None:
        """Move the sum to where the parameters are."""
        for name, parameter in self.parameters.items():
            if self.total[name].device != parameter.device:
                self.total[name] = self.total[name].to(parameter.device)

    def absorb(self, num_new: int) -> None:
        """Take in the parameters' ``.grad``, the mean gradient of a batch.

        Parameters
        ----------
        num_new : int
            Examples n in the batch; more than N count as N.
        """
        num_new = min(num_new, self.num_samples)
        keep = 1 - num_new / self.num_samples
        for name, parameter in self.parameters.items():
            self.total[name].mul_(keep)
            if parameter.grad is not None:
                self.total[name].add_(parameter.grad, alpha=num_new)
        self.covered = keep * self.covered + num_new

    def follow(self, start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> None:
        """Point where the whole fleet went: along the server's last update.

        Parameters
        ----------
        start, end : mapping of str to Tensor
            The global model before and after that update; names beyond those followed are
            passed over. Where the two are equal nothing changes.

        Notes
        -----
        The update's length has no unit of a gradient, so it takes the present length if there
        is one: priorities keep their scale and their trends stay valid.
        """
        descent = {n: (start[n] - end[n]).to(part) for n, part in self.total.items()}
        length = _length(descent)
        if length > 0.0:
            present = _length(self.total) if self.is_known else length * self.num_samples
            self.total = {name: part * (present / length) for name, part in descent.items()}
            self.covered = self.covered or float(self.num_samples)

    def state_dict(self) -> StateDict:
        """Return the sum and its cover as flat arrays and scalars."""
        arrays: StateDict = {
            PREFIX + name: part.cpu().numpy().copy() for name, part in self.total.items()
        }
        return arrays | {"gradient_covered": self.covered}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken.

        Parameters
        ----------
        state : dict
            From :meth:`state_dict`; other keys are passed over.

        Raises
        ------
        ValueError
            If a parameter is missing or has another shape, or a figure is not finite. The
            gradient is then unchanged.
        """
        arrays = {name: np.asarray(state.get(PREFIX + name)) for name in self.total}
        covered = float(state.get("gradient_covered", np.nan))
        for name, part in self.total.items():
            if arrays[name].shape != tuple(part.shape) or not np.isfinite(arrays[name]).all():
                raise ValueError(f"state holds no gradient of {name}: start afresh.")
        if not 0.0 <= covered <= self.num_samples * (1 + 1e-9):
            raise ValueError(f"state holds an impossible cover {covered}: start afresh.")
        self.total = {
            name: torch.from_numpy(arrays[name].copy()).to(part)
            for name, part in self.total.items()
        }
        self.covered = covered


def _length(parts: Mapping[str, Tensor]) -> float:
    return float(
        torch.stack([part.double().square().sum() for part in parts.values()]).sum().sqrt()
    )

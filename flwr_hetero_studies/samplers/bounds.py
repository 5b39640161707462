"""Samplers whose own work counts nothing: bounds for those that have to pay for it.

Twice as many examples have half of the noise; draws by fresh gradient norms have less as well.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flwr_hetero.sampler import BatchSampler, UniformSampler
from flwr_hetero_studies.tasks.data import Examples

POOL = 8
"""Batches from which one is drawn."""
FLOOR = 0.001
"""Least score, in means: what every example keeps as a chance."""


class FreshNorms(UniformSampler):
    """Draw a batch out of a pool of some by gradient norms, computed afresh, with unbiased weights.

    Among draws one by one these have the least noise. The norm is that of the last layer's
    gradient, which the whole one's goes with (Katharopoulos and Fleuret, "Not All Samples Are
    Created Equal", ICML 2018); the draw is systematic.
    """

    def __init__(self, train: Examples, model: nn.Module, size: int, seed: int) -> None:
        super().__init__(len(train), min(len(train), POOL * size), seed=seed)
        self.train, self.model, self.size = train, model, size
        self.features = torch.empty(0)
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        layers[-1].register_forward_hook(self._keep)

    def _keep(self, layer: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        self.features = inputs[0].detach().flatten(1)

    def next_batch(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Draw ``size`` of the pool, each with chance p and the weight 1 / (pool p)."""
        pool, _ = super().next_batch()
        norms = self.norms(pool)
        # none may be left out, or the mean is biased
        norms += FLOOR * norms.mean()
        chances = norms / norms.sum()
        # systematic: one random start for all draws
        places = (self.rng.random() + np.arange(self.size)) / self.size
        drawn = np.searchsorted(chances.cumsum(), places).clip(0, len(pool) - 1)
        return pool[drawn], 1.0 / (len(pool) * chances[drawn])

    @torch.no_grad()
    def norms(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the norms of the last layer's gradients of cross-entropy, weights and bias."""
        inputs, targets = self.train.take(indices)
        slopes = self.model(inputs).softmax(1)
        # of cross-entropy by its logits: softmax less one-hot
        slopes[torch.arange(len(targets)), targets] -= 1.0
        squares = slopes.square().sum(1) * (1.0 + self.features.square().sum(1))
        return squares.sqrt().double().numpy()


DOUBLE, NORMS = "double batches, for nothing", "gradient norms, for nothing"
BOUNDS: dict[str, Callable[[Examples, nn.Module, int, int], BatchSampler]] = {
    DOUBLE: lambda train, model, size, seed: UniformSampler(len(train), 2 * size, seed=seed),
    NORMS: FreshNorms,
}

"""Batch samplers for the node: which examples to train on, in which order, at which weight."""

from flwr_hetero.errors import install_hint

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the samplers of flwr_hetero.sampler work in PyTorch's DataLoader; flwr_hetero.strategy "
        f"and flwr_hetero.mod need no PyTorch: {install_hint('node', 'torch')}",
        name="torch",
    ) from error

from flwr_hetero.biased_local_sgd.sampler import TopLossSampler
from flwr_hetero.cd_grab.sampler import OrderedSampler
from flwr_hetero.client.batch_sampler import BatchSampler, UniformSampler
from flwr_hetero.client.weighted_loss import WeightedLoss
from flwr_hetero.mercury.sampler import MercurySampler
from flwr_hetero.pgd.priorities import sample_priorities
from flwr_hetero.pgd.sampler import PGDSampler, PriorityFeed

__all__ = [
    "BatchSampler",
    "MercurySampler",
    "OrderedSampler",
    "PGDSampler",
    "PriorityFeed",
    "TopLossSampler",
    "UniformSampler",
    "WeightedLoss",
    "sample_priorities",
]

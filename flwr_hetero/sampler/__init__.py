"""Batch samplers for the node: which examples to train on, in which order, at which weight."""

from flwr_hetero.sampler.herding_probe import HerdingProbe
from flwr_hetero.sampler.in_turn import InTurn
from flwr_hetero.sampler.mercury import MercurySampler
from flwr_hetero.sampler.ordered import OrderedSampler
from flwr_hetero.sampler.pgd import PGDSampler
from flwr_hetero.sampler.priorities import sample_priorities
from flwr_hetero.sampler.priority_feed import PriorityFeed
from flwr_hetero.sampler.sampled_loss import SampledLoss
from flwr_hetero.sampler.top_loss import TopLossSampler

__all__ = [
    "HerdingProbe",
    "InTurn",
    "MercurySampler",
    "OrderedSampler",
    "PGDSampler",
    "PriorityFeed",
    "SampledLoss",
    "TopLossSampler",
    "sample_priorities",
]

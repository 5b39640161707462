"""Wrapper strategies for heterogeneous fleets."""

from flwr_hetero.asynchronous.strategy import FedBuff
from flwr_hetero.biased_local_sgd.strategy import BiasedLocalSGD, LocalSteps
from flwr_hetero.cd_grab.strategy import CDGraB
from flwr_hetero.compression.strategy import Compressed
from flwr_hetero.mercury.strategy import Resharding
from flwr_hetero.server.checkpoint import Recorded
from flwr_hetero.server.profiling import SamplerMetrics
from flwr_hetero.server.selection import RandomSelection, Selection
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.slices.strategy import FedSlice, ModelAverage
from flwr_hetero.tifl.strategy import TiFL

__all__ = [
    "BiasedLocalSGD",
    "CDGraB",
    "Compressed",
    "FedBuff",
    "FedSlice",
    "LocalSteps",
    "ModelAverage",
    "RandomSelection",
    "Recorded",
    "Resharding",
    "SamplerMetrics",
    "Selection",
    "TiFL",
    "Wrapper",
]

"""Wrapper strategies for heterogeneous fleets."""

from flwr_hetero.strategy.adacomm import AdaComm
from flwr_hetero.strategy.biased_local_sgd import BiasedLocalSGD
from flwr_hetero.strategy.cd_grab import CDGraB
from flwr_hetero.strategy.fednova import FedNova
from flwr_hetero.strategy.herding_meter import HerdingMeter
from flwr_hetero.strategy.local_steps import LocalSteps
from flwr_hetero.strategy.over_select import OverSelect
from flwr_hetero.strategy.recorded import Recorded
from flwr_hetero.strategy.resharding import Resharding
from flwr_hetero.strategy.sampler_facts import SamplerFacts
from flwr_hetero.strategy.tifl import TiFL
from flwr_hetero.strategy.wrapper import Wrapper

__all__ = [
    "AdaComm",
    "BiasedLocalSGD",
    "CDGraB",
    "FedNova",
    "HerdingMeter",
    "LocalSteps",
    "OverSelect",
    "Recorded",
    "Resharding",
    "SamplerFacts",
    "TiFL",
    "Wrapper",
]

"""Wrapper strategies for heterogeneous fleets."""

from flwr_hetero.baselines.adacomm import AdaComm
from flwr_hetero.baselines.deadline import DeadlineSelection
from flwr_hetero.baselines.fedasync import FedAsync
from flwr_hetero.baselines.fedat import FedAT
from flwr_hetero.baselines.fedcompass import FedCompass
from flwr_hetero.baselines.fednova import FedNova
from flwr_hetero.baselines.model_average import ModelAverage
from flwr_hetero.baselines.oort import Oort
from flwr_hetero.baselines.over_select import OverSelect
from flwr_hetero.baselines.power_of_choice import PowerOfChoice
from flwr_hetero.biased_local_sgd.step_budget import LocalSteps
from flwr_hetero.biased_local_sgd.strategy import BiasedLocalSGD
from flwr_hetero.cd_grab.herding_meter import HerdingMeter
from flwr_hetero.cd_grab.strategy import CDGraB
from flwr_hetero.fedbuff.strategy import FedBuff
from flwr_hetero.mercury.resharding_strategy import Resharding
from flwr_hetero.server.checkpoint import Recorded
from flwr_hetero.server.profiling import SamplerFacts
from flwr_hetero.server.selection import RandomSelection, Selection
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.slices.strategy import FedSlice
from flwr_hetero.tifl.strategy import TiFL

__all__ = [
    "AdaComm",
    "BiasedLocalSGD",
    "CDGraB",
    "DeadlineSelection",
    "FedAT",
    "FedAsync",
    "FedBuff",
    "FedCompass",
    "FedNova",
    "FedSlice",
    "HerdingMeter",
    "LocalSteps",
    "ModelAverage",
    "Oort",
    "OverSelect",
    "PowerOfChoice",
    "RandomSelection",
    "Recorded",
    "Resharding",
    "SamplerFacts",
    "Selection",
    "TiFL",
    "Wrapper",
]

"""Wrapper strategies for heterogeneous fleets."""

import warnings
from importlib import import_module
from typing import Any

from flwr_hetero.asynchronous.over_select import OverSelect
from flwr_hetero.asynchronous.strategy import FedBuff
from flwr_hetero.biased_local_sgd.strategy import BiasedLocalSGD, FedNova, LocalSteps
from flwr_hetero.cd_grab.strategy import CDGraB
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
    "FedBuff",
    "FedNova",
    "FedSlice",
    "LocalSteps",
    "ModelAverage",
    "OverSelect",
    "RandomSelection",
    "Recorded",
    "Resharding",
    "SamplerMetrics",
    "Selection",
    "TiFL",
    "Wrapper",
]

MOVED = {
    "AdaComm": "rivals.adacomm",
    "DeadlineSelection": "rivals.deadline",
    "FedAT": "rivals.fedat",
    "FedAsync": "rivals.fedasync",
    "FedCompass": "rivals.fedcompass",
    "HerdingMeter": "papers.cd_grab.herding",
    "Oort": "rivals.oort",
    "PowerOfChoice": "rivals.power_of_choice",
}
"""What is now imported from the studies; the old place stays for one release."""


def __getattr__(name: str) -> Any:
    """Find a name in its new place, with a warning."""
    if name not in MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = f"flwr_hetero_studies.{MOVED[name]}"
    warnings.warn(f"{name} has moved to {place}", DeprecationWarning, stacklevel=2)
    return getattr(import_module(place), name)

"""Wrapper strategies for heterogeneous fleets."""

import warnings
from importlib import import_module
from typing import Any

from flwr_hetero.asynchronous.over_select import OverSelect
from flwr_hetero.asynchronous.strategy import FedBuff
from flwr_hetero.biased_local_sgd.strategy import BiasedLocalSGD, FedNova, LocalSteps
from flwr_hetero.cd_grab.strategy import CDGraB
from flwr_hetero.compression.strategy import Compressed
from flwr_hetero.mercury.strategy import Resharding
from flwr_hetero.server.checkpoint import Recorded
from flwr_hetero.server.profiling import SamplerMetrics
from flwr_hetero.server.selection import RandomSelection, Selection
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.slices.average import ModelAverage
from flwr_hetero.slices.strategy import FedSlice
from flwr_hetero.tifl.strategy import TiFL

__all__ = [
    "BiasedLocalSGD",
    "CDGraB",
    "Compressed",
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

RIVALS = "flwr_hetero_studies.rivals."
MOVED = {
    "AdaComm": RIVALS + "adacomm",
    "DeadlineSelection": RIVALS + "deadline",
    "FedAT": RIVALS + "fedat",
    "FedAsync": RIVALS + "fedasync",
    "FedCompass": RIVALS + "fedcompass",
    "HerdingMeter": "flwr_hetero_studies.papers.cd_grab.herding",
    "Oort": RIVALS + "oort",
    "PowerOfChoice": RIVALS + "power_of_choice",
    "SamplerFacts": "flwr_hetero.strategy.SamplerMetrics",
}
"""Where names of before are found; the old ones stay for one release."""


def __getattr__(name: str) -> Any:
    """Find a name in its new place, with a warning."""
    if name not in MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{name} is now found as {MOVED[name]}", DeprecationWarning, stacklevel=2)
    return SamplerMetrics if name == "SamplerFacts" else getattr(import_module(MOVED[name]), name)

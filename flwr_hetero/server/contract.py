"""Old names of composition.py and client_support.py, until every room has the new ones."""

from collections.abc import Mapping
from math import isfinite, nan
from typing import Any

from flwr_hetero import keys
from flwr_hetero.errors import check_choice
from flwr_hetero.records import read_number
from flwr_hetero.server.client_support import STEPS as STEPS
from flwr_hetero.server.client_support import TIMES as TIMES
from flwr_hetero.server.client_support import ClientSupport as Contract
from flwr_hetero.server.client_support import MissingClientSupportError as MissingHelpError
from flwr_hetero.server.client_support import holds as holds
from flwr_hetero.server.composition import check_composition as check_composition
from flwr_hetero.server.composition import check_enough_updates as check_enough_updates
from flwr_hetero.server.composition import check_start as check_start
from flwr_hetero.server.composition import check_unscaled as check_unscaled
from flwr_hetero.server.composition import name_of as name_of

__all__ = ["Contract", "MissingHelpError"]
ON_MISSING = ("raise", "warn")
USUAL_KEY = "train-loss"


def loss_contract(key: str | None, without: str) -> Contract:
    """Make the contract of a method that goes by the loss in this metric, or in any."""
    name = key or USUAL_KEY
    line = f'    metrics = MetricRecord({{"num-examples": ..., "{name}": loss}})'
    return Contract(name, "training loss", line, without)


def training_loss(metrics: Mapping[str, Any], key: str | None = None) -> float:
    """Return a node's mean training loss; NaN if it reports none."""
    found = sorted(metrics, key=lambda name: ("train" not in name, name))
    names = [key] if key else [n for n in found if "loss" in n and n != keys.LOSS_RMS]
    return read_number(metrics, names[0]) if names else nan


def loss_per_sample(metrics: Mapping[str, Any], key: str | None = None) -> float:
    """Return the root mean square of a node's losses per sample, else its mean loss; or NaN."""
    square = read_number(metrics, keys.LOSS_RMS) if key is None else nan
    return square if isfinite(square) else training_loss(metrics, key)


def check_on_missing(on_missing: str) -> str:
    """Refuse what is no way to treat missing help."""
    return str(check_choice("on_missing", on_missing, ON_MISSING))

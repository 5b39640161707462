"""The strategies of Flower that the apps put inside theirs."""

from typing import Any

from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian, FedProx, FedTrimmedAvg

from flwr_hetero_studies.tasks.settings import Settings

INNER: dict[str, tuple[type[FedAvg], dict[str, float]]] = {
    "fedavg": (FedAvg, {}),
    "fedadam": (FedAdam, {}),
    "fedavgm": (FedAvgM, {"server_momentum": 0.9}),
    "fedprox": (FedProx, {"proximal_mu": 0.1}),
    "fedmedian": (FedMedian, {}),
    "fedtrimmedavg": (FedTrimmedAvg, {}),
}
"""Name to strategy, with what Flower leaves without a default."""


def inner_strategy(name: str, settings: Settings, **more: Any) -> FedAvg:
    """Make one; it evaluates on nodes only if ``more`` says so."""
    kind, given = INNER[name]
    # Flower leaves mu without a default
    if kind is FedProx and settings.proximal_mu:
        given = {"proximal_mu": settings.proximal_mu}
    arguments: dict[str, Any] = {"fraction_evaluate": 0.0, **given, **more}
    return kind(**arguments)

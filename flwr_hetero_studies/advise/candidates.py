"""The settings to choose from: run-configs of apps/fleet, and the strategies that they make."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from flwr.serverapp.strategy import FedAvg

from flwr_hetero import strategy as ours
from flwr_hetero_studies.rivals import DeadlineSelection, Oort, OverSelect
from flwr_hetero_studies.tasks.run import INNER

AVERAGED = 8
"""Rounds of a running average of models."""
BITS = 4
"""Bits of a compressed value, each way."""
PACKED = ("FedBuff, epochs", "FedSlice", "FedSlice, few in flight")
"""Settings, beside the first one, that are also tried with compression if links are limited."""
BASES = ("fedavg", "fedavgm", "fedadam")
"""Strategies of Flower that the others can be put around."""
Settings: TypeAlias = dict[str, Any]
Part: TypeAlias = tuple[type[ours.Wrapper], Settings]
"""A strategy and its arguments."""
Base: TypeAlias = tuple[type[FedAvg], dict[str, float]]
SOME = "clients_per_round"
UNSEEDED = (OverSelect, ours.ModelAverage, ours.Compressed)
"""Strategies without randomness."""


@dataclass(frozen=True)
class Candidate:
    """A setting, as a run-config of ``apps/fleet``."""

    name: str
    run_config: Settings

    @property
    def sets_steps(self) -> bool:
        return bool(self.run_config.get("steps") != "epochs")

    @property
    def is_packed(self) -> bool:
        return "bits-up" in self.run_config

    @property
    def base(self) -> Base:
        return INNER[self.run_config.get("inner", "fedavg")]

    def parts(self, fast_steps: int) -> list[Part]:
        """Return the strategies around the base and their settings, the outermost first."""
        config = self.run_config
        parts: list[Part] = []
        if self.is_packed:
            bits = {"bits_up": config["bits-up"], "bits_down": config["bits-down"]}
            parts.append((ours.Compressed, bits))
        if config["engine"] == "fedslice":
            given = {"concurrency": config["concurrency"]} if "concurrency" in config else {}
            return [*parts, (ours.FedSlice, given)]
        if "average-rounds" in config:
            parts.append((ours.ModelAverage, {"window": config["average-rounds"]}))
        if config["engine"] == "buffered":
            size = {"buffer_size": config["buffer-size"]} if "buffer-size" in config else {}
            parts.append((ours.FedBuff, size))
        else:
            parts += SELECTED[config["selection"]](config)
        if self.sets_steps:
            steps = {"fast_steps": fast_steps, "budget": config["steps"]}
            parts.append((ours.BiasedLocalSGD, steps | {"high_loss_fraction": None}))
        return parts

    def strategy(self, fast_steps: int, seed: int) -> ours.Wrapper:
        kind, given = self.base
        # Evaluation on nodes would take time that says nothing about a setting.
        arguments: Settings = {"fraction_evaluate": 0.0, **given}
        made: Any = kind(**arguments)
        for part, settings in reversed(self.parts(fast_steps)):
            seeded = {} if part in UNSEEDED else {"seed": seed}
            made = part(made, **settings, **seeded)
        assert isinstance(made, ours.Wrapper)
        return made

    def python(self, fast_steps: int) -> str:
        """Write the lines for a ServerApp.

        >>> print(Candidate("", {"engine": "fedslice", "concurrency": 3}).python(16))
        from flwr_hetero.strategy import FedSlice
        strategy = FedSlice(concurrency=3)
        """
        base, given = self.base
        parts = self.parts(fast_steps)
        text = ""
        places: dict[str, set[str]] = {}
        if base is not FedAvg:
            text = f"{base.__name__}({', '.join(f'{k}={v!r}' for k, v in given.items())})"
            places["flwr.serverapp.strategy"] = {base.__name__}
        for kind, settings in reversed(parts):
            inner = [text] if text else []
            arguments = [*inner, *(f"{name}={value!r}" for name, value in settings.items())]
            text = f"{kind.__name__}({', '.join(arguments)})"
            is_rival = kind.__module__.startswith("flwr_hetero_studies")
            place = "flwr_hetero_studies.rivals" if is_rival else "flwr_hetero.strategy"
            places.setdefault(place, set()).add(kind.__name__)
        lines = [f"from {p} import {', '.join(sorted(names))}" for p, names in places.items()]
        return "\n".join([*sorted(lines), f"strategy = {text}"])


SELECTED: dict[str, Callable[[Settings], list[Part]]] = {
    "all": lambda own: [(ours.RandomSelection, {SOME: None})],
    "random": lambda own: [(ours.RandomSelection, {SOME: own["clients-per-round"]})],
    "over-select": lambda own: [
        (OverSelect, {"take": own["clients-per-round"]}),
        (ours.RandomSelection, {SOME: own["clients-per-round"] + own["spare-clients"]}),
    ],
    "tifl": lambda own: [(ours.TiFL, {SOME: own["clients-per-round"],
                          "num_tiers": own["num-tiers"], "policy": own["policy"]})],
    "oort": lambda own: [(Oort, {SOME: own["clients-per-round"],
                          "profiling": bool(own["sync-rounds"])})],
    "deadline": lambda own: [(DeadlineSelection, {SOME: own["clients-per-round"]})],
}  # fmt: skip
"""Strategies of each selection of ``apps/fleet``."""


def candidates(
    num_nodes: int, clients_per_round: int, *, limited: bool = False, base: str = "fedavg"
) -> list[Candidate]:
    """Return the settings to try, first the one that the others are compared with.

    ``limited``: whether transfers over the fleet's links take time. ``base``: the strategy that
    they are put around.

    >>> [each.name for each in candidates(20, 3, limited=True)][-1]
    'FedSlice, few in flight, 4 bits'
    """
    some = {"clients-per-round": clients_per_round}
    # Ask half as many nodes more, if there are so many.
    spare = min(max(1, clients_per_round // 2), num_nodes - clients_per_round)
    # A tier must have enough nodes for a round.
    num_tiers = max(2, min(5, num_nodes // max(2, clients_per_round)))
    tiers = {"num-tiers": num_tiers, "policy": "adaptive"}
    selected: dict[str, Settings] = {
        "over-selection": {"selection": "over-select", "spare-clients": spare},
        "Oort": {"selection": "oort", "sync-rounds": 1},
        "FedCS": {"selection": "deadline"},
    }
    rounds, buffered, sliced = ({"engine": e} for e in ("rounds", "buffered", "fedslice"))
    every = {"selection": "all"}
    random = {"selection": "random"}
    first = INNER[base][0].__name__
    found: dict[str, Settings] = {
        first: rounds | random | some | {"steps": "epochs"},
        "all nodes": rounds | every | {"steps": "epochs"},
        **{name: rounds | own | some | {"steps": "epochs"} for name, own in selected.items()},
        "TiFL": rounds | {"selection": "tifl", **some, **tiers, "steps": "epochs"},
        "deadline": rounds | random | some | {"steps": "deadline"},
        "over-selection, deadline": rounds | selected["over-selection"] | some
        | {"steps": "deadline"},
        "TiFL, deadline": rounds | {"selection": "tifl", **some, **tiers, "steps": "deadline"},
        "all nodes, deadline": rounds | every | {"steps": "deadline"},
        "all nodes, deadline, averaged": rounds | every
        | {"steps": "deadline", "average-rounds": AVERAGED},
        "FedBuff, epochs": buffered | every | {"steps": "epochs"},
        "FedBuff, buffer of 1": buffered | every | {"steps": "epochs", "buffer-size": 1},
        "FedSlice": sliced | every,
        "FedSlice, few in flight": sliced | random | {"concurrency": clients_per_round},
    }  # fmt: skip
    bits = {"bits-up": BITS, "bits-down": BITS}
    found |= {f"{n}, {BITS} bits": found[n] | bits for n in (first, *PACKED) if limited}
    # If all nodes train, there is nothing to select.
    left_out = () if num_nodes > clients_per_round else (*selected, "over-selection, deadline")
    inner = {} if base == "fedavg" else {"inner": base}
    return [Candidate(name, own | inner) for name, own in found.items() if name not in left_out]

"""The settings to choose from: strategies around the user's own strategy of Flower."""

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
Part: TypeAlias = tuple[type[ours.Wrapper], dict[str, Any]]
"""A strategy and its arguments."""
UNSEEDED = (OverSelect, ours.ModelAverage, ours.Compressed)
"""Strategies without randomness."""


@dataclass(frozen=True)
class Candidate:
    """A setting: strategies around the base, the outermost first."""

    name: str
    parts: tuple[Part, ...]
    base: tuple[type[FedAvg], dict[str, float]]

    def has(self, *kinds: type[ours.Wrapper]) -> bool:
        return any(kind in kinds for kind, _ in self.parts)

    def inside_out(self, fast_steps: int) -> list[Part]:
        """Return the strategies from the base on, with the steps of a quick node."""
        known: dict[str, Any] = {"fast_steps": fast_steps}
        return [
            (kind, settings | known if "fast_steps" in settings else settings)
            for kind, settings in reversed(self.parts)
        ]

    def strategy(self, fast_steps: int, seed: int) -> ours.Wrapper:
        kind, given = self.base
        # Evaluation on nodes would take time that says nothing about a setting.
        arguments: dict[str, Any] = {"fraction_evaluate": 0.0, **given}
        made: Any = kind(**arguments)
        for part, settings in self.inside_out(fast_steps):
            seeded = {} if part in UNSEEDED else {"seed": seed}
            made = part(made, **settings, **seeded)
        assert isinstance(made, ours.Wrapper)
        return made

    def python(self, fast_steps: int) -> str:
        """Write the lines for a ServerApp.

        >>> print(candidates(20, 3)[-1].python(16))
        from flwr_hetero.strategy import FedSlice
        strategy = FedSlice(concurrency=3)
        """
        base, given = self.base
        text = ""
        places: dict[str, set[str]] = {}
        if base is not FedAvg:
            text = f"{base.__name__}({', '.join(f'{k}={v!r}' for k, v in given.items())})"
            places["flwr.serverapp.strategy"] = {base.__name__}
        for kind, settings in self.inside_out(fast_steps):
            inner = [text] if text else []
            arguments = [*inner, *(f"{name}={value!r}" for name, value in settings.items())]
            text = f"{kind.__name__}({', '.join(arguments)})"
            is_rival = kind.__module__.startswith("flwr_hetero_studies")
            place = "flwr_hetero_studies.rivals" if is_rival else "flwr_hetero.strategy"
            places.setdefault(place, set()).add(kind.__name__)
        lines = [f"from {p} import {', '.join(sorted(names))}" for p, names in places.items()]
        return "\n".join([*sorted(lines), f"strategy = {text}"])


def candidates(
    num_nodes: int, clients_per_round: int, *, limited: bool = False, base: str = "fedavg"
) -> list[Candidate]:
    """Return the settings to try, first the one that the others are compared with.

    ``limited``: whether transfers over the fleet's links take time. ``base``: the strategy that
    they are put around.

    >>> [each.name for each in candidates(20, 3, limited=True)][-1]
    'FedSlice, few in flight, 4 bits'
    """
    # Ask half as many nodes more, if there are so many.
    spare = min(max(1, clients_per_round // 2), num_nodes - clients_per_round)
    # A tier must have enough nodes for a round.
    num_tiers = max(2, min(5, num_nodes // max(2, clients_per_round)))
    some: dict[str, Any] = {"clients_per_round": clients_per_round}
    random: Part = (ours.RandomSelection, some)
    every: Part = (ours.RandomSelection, {"clients_per_round": None})
    over: tuple[Part, ...] = (
        (OverSelect, {"take": clients_per_round}),
        (ours.RandomSelection, {"clients_per_round": clients_per_round + spare}),
    )
    tifl: Part = (ours.TiFL, some | {"num_tiers": num_tiers, "policy": "adaptive"})
    deadline: Part = (
        ours.BiasedLocalSGD,
        {"fast_steps": None, "budget": "deadline", "high_loss_fraction": None},
    )
    average: Part = (ours.ModelAverage, {"window": AVERAGED})
    first = INNER[base][0].__name__
    selecting: dict[str, tuple[Part, ...]] = {
        "over-selection": over,
        "Oort": ((Oort, some | {"profiling": True}),),
        "FedCS": ((DeadlineSelection, some),),
        "over-selection, deadline": (*over, deadline),
    }
    found: dict[str, tuple[Part, ...]] = {
        first: (random,),
        "all nodes": (every,),
        # If all nodes train, there is nothing to select.
        **(selecting if num_nodes > clients_per_round else {}),
        "TiFL": (tifl,),
        "deadline": (random, deadline),
        "TiFL, deadline": (tifl, deadline),
        "all nodes, deadline": (every, deadline),
        "all nodes, deadline, averaged": (average, every, deadline),
        "FedBuff, epochs": ((ours.FedBuff, {}),),
        "FedBuff, buffer of 1": ((ours.FedBuff, {"buffer_size": 1}),),
        "FedSlice": ((ours.FedSlice, {}),),
        "FedSlice, few in flight": ((ours.FedSlice, {"concurrency": clients_per_round}),),
    }
    if limited:
        packed: Part = (ours.Compressed, {"bits_up": BITS, "bits_down": BITS})
        found |= {f"{name}, {BITS} bits": (packed, *found[name]) for name in (first, *PACKED)}
    return [Candidate(name, parts, INNER[base]) for name, parts in found.items()]

"""Settings of this app, and the composition of strategies that they describe."""

from dataclasses import dataclass
from typing import Any

from flwr.serverapp.strategy import Strategy

from flwr_hetero.cd_grab.sampler import METHODS
from flwr_hetero.compression.algorithm import BITS
from flwr_hetero.errors import check_choice, check_count, check_number, invalid
from flwr_hetero.strategy import (
    BiasedLocalSGD,
    CDGraB,
    Compressed,
    FedBuff,
    FedSlice,
    ModelAverage,
    RandomSelection,
    SamplerMetrics,
    TiFL,
    Wrapper,
)
from flwr_hetero_studies.rivals import (
    DeadlineSelection,
    FedAsync,
    FedAT,
    FedCompass,
    FedNova,
    Oort,
    OverSelect,
    PowerOfChoice,
)
from flwr_hetero_studies.tasks.run import INNER, inner_strategy
from flwr_hetero_studies.tasks.settings import Settings, key_of

PARTS = {
    "engine": ("fedslice", "rounds", "buffered", "fedat", "fedasync", "fedcompass"),
    "selection": ("all", "random", "tifl", "over-select", "oort", "power-of-choice", "deadline"),
    "steps": ("auto", "epochs", "equal", "by-speed", "deadline"),
    "weighting": ("auto", "normalised", "sqrt", "examples", "steps", "fednova"),
    "order": ("reshuffle", *METHODS),
    "sampler": ("uniform", "top-loss", "mercury", "pgd"),
    "inner": tuple(INNER),
}
STEPS_RATIO = 5
"""Most steps of FedCompass, in ``fast-steps``, its least: the paper's ratio."""
MERGING = {"steps": "examples", "examples": "sqrt", "sqrt": "sqrt"}
"""How FedBuff weighs, by ``weighting``: the others undo the pace of the nodes."""
CORRECTION = {"normalised": 1.0, "sqrt": 0.5, "examples": 0.0, "steps": 0.0}
"""Power of the steps that is undone, by ``weighting``."""
WINDOW = 32
"""Models in FedSlice's average, unless ``average_rounds`` says how many."""
RESHUFFLE, TOP_LOSS, UNIFORM = "reshuffle", "top-loss", "uniform"
FEDSLICE_DECIDES: dict[str, tuple[Any, str]] = {
    "steps": (
        "auto",
        "fast-steps is what a quick node takes in a slice; engine=buffered has steps",
    ),
    "weighting": ("auto", "give rate-correction"),
    "buffer_size": (0, "a quarter of the nodes in flight; engine=buffered has it"),
}
FEDSLICE_ONLY: dict[str, tuple[Any, str]] = {
    "rate_correction": (1.0, "it is of engine=fedslice, weighting is what this one has"),
}
"""Setting to its only value where it means nothing, and a hint."""
FROM_ZERO = {
    "concurrency": "0 is all nodes online",
    "buffer_size": "0 is half of the nodes in flight",
    "spare_clients": "2 is a start",
    "average_rounds": "0 is the engine's own",
    "num_units": "0 is each node's own",
}
"""Settings that may be 0, and a hint."""


@dataclass(frozen=True)
class FleetSettings(Settings):
    """The run-config of ``apps/fleet``; see its pyproject.toml."""

    num_server_rounds: int = 60
    engine: str = "fedslice"
    selection: str = "all"
    steps: str = "auto"
    weighting: str = "auto"
    order: str = "reshuffle"
    sampler: str = "uniform"
    inner: str = "fedavg"
    rate_correction: float = 1.0
    concurrency: int = 0
    buffer_size: int = 0
    clients_per_round: int = 3
    num_tiers: int = 5
    policy: str = "adaptive"
    sync_rounds: int = 0
    spare_clients: int = 2
    fast_steps: int = 10
    num_units: int = 0
    average_rounds: int = 0
    bits_up: int = 0
    bits_down: int = 0
    fraction_evaluate: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in PARTS.items():
            self.check_choice(name, known)
        for name in ("clients_per_round", "num_tiers"):
            if getattr(self, name) < 1:
                value = getattr(self, name)
                raise invalid(key_of(name), value, "be at least 1", "see pyproject.toml")
        check_count("sync-rounds", self.sync_rounds)
        check_count("fast-steps", self.fast_steps, 1)
        for name in ("bits_up", "bits_down"):
            check_choice(key_of(name), getattr(self, name), (0, *BITS), "0 is as it is")
        for name, hint in FROM_ZERO.items():
            if getattr(self, name) < 0:
                raise invalid(key_of(name), getattr(self, name), "be at least 0", hint)
        for name in ("fraction_evaluate", "rate_correction"):
            check_number(key_of(name), getattr(self, name), "[0, 1]")
        self._check_together()
        self._check_engine()
        TiFL(None, self.clients_per_round, self.num_tiers, policy=self.policy)  # refuses others

    def _check_together(self) -> None:
        if self.step_rule == "epochs" and self.weighting not in ("auto", "examples"):
            rule = "be equal, by-speed or deadline, for the server must know the steps"
            raise invalid("steps", self.steps, rule, f"or weighting=examples, not {self.weighting}")
        if self.order != RESHUFFLE and self.sampler != UNIFORM:
            rule = f"be uniform with order={self.order}: an order visits each example once a pass"
            raise invalid("sampler", self.sampler, rule)
        if self.sampler == TOP_LOSS and (self.step_rule == "epochs" or self.weighting == "fednova"):
            rule = "be without top-loss here: biased local SGD says which nodes are fast"
            hint = "give steps other than epochs, and weighting other than fednova"
            raise invalid("sampler", self.sampler, rule, hint)

    def _check_engine(self) -> None:
        if self.engine == "fedslice":
            self._refuse(FEDSLICE_DECIDES)
        else:
            self._refuse(FEDSLICE_ONLY)
        if self.engine == "rounds":
            self._refuse(dict.fromkeys(("concurrency", "buffer_size"), (0, "or buffered")))
        else:
            self._check_without_rounds()

    def _refuse(self, settings: dict[str, tuple[Any, str]]) -> None:
        """Refuse settings that mean nothing with this engine."""
        for name, (meant, hint) in settings.items():
            if (value := getattr(self, name)) != meant:
                raise invalid(key_of(name), value, f"be {meant} with engine={self.engine}", hint)

    def _check_without_rounds(self) -> None:
        if self.engine == "fedcompass" and self.step_rule != "epochs":
            rule = "be epochs with engine=fedcompass, which sets them"
            raise invalid("steps", self.steps, rule, "fast-steps is the least")
        if self.selection not in ("random", "all"):
            rule = f"be random or all with engine={self.engine}"
            hint = "concurrency is the number of nodes in flight; engine=rounds selects"
            raise invalid("selection", self.selection, rule, hint)
        if self.selection == "all" and self.concurrency:
            hint = "give selection=random"
            raise invalid("concurrency", self.concurrency, "be 0 with selection=all", hint)
        if self.order == "cd-grab":
            rule = f"be another with engine={self.engine}: the order server needs rounds"
            hint = "id-grab is the same without a server"
            raise invalid("order", self.order, rule, hint)
        if self.sampler == TOP_LOSS:
            rule = f"be without top-loss with engine={self.engine}"
            hint = "how much a fast node samples by loss depends on the others of its round"
            raise invalid("sampler", self.sampler, rule, hint)

    @property
    def step_rule(self) -> str:
        """Who sets the steps: what is typed, or what the engine does by itself."""
        usual = {"fedcompass": "epochs"}
        return usual.get(self.engine, "by-speed") if self.steps == "auto" else self.steps

    def strategy(self, num_nodes: int) -> Wrapper:
        """Compose the strategies: which nodes train, for how long, how weighted, in which order."""
        composed = self._composed(num_nodes)
        if self.bits_up or self.bits_down:
            composed = Compressed(composed, self.bits_up or None, self.bits_down or None)
        return SamplerMetrics(composed)

    def _composed(self, num_nodes: int) -> Wrapper:
        strategy: Strategy = inner_strategy(self.inner, self.fraction_evaluate)
        if self.order == "cd-grab":
            strategy = CDGraB(strategy, num_units=self.num_units or None, seed=self.seed)
        if self.engine == "fedslice":
            return self._sliced(strategy)
        if self.step_rule != "epochs":
            strategy = self._stepped(strategy)
        num_tiers = min(self.num_tiers, max(num_nodes, 1))
        select = self._selecting if self.engine == "rounds" else self._merging
        strategy = select(strategy, num_tiers)
        if self.selection == "over-select":
            strategy = OverSelect(strategy, self.clients_per_round)
        if self.average_rounds:
            strategy = ModelAverage(strategy, window=self.average_rounds)
        return strategy

    def _sliced(self, strategy: Strategy) -> FedSlice:
        return FedSlice(
            strategy,
            concurrency=self.concurrency or None,
            slice_steps=self.fast_steps,
            rate_correction=self.rate_correction,
            window=self.average_rounds or WINDOW,
            seed=self.seed,
        )

    def _selecting(self, strategy: Strategy, num_tiers: int) -> Wrapper:
        """Put the selection of each round's nodes around a strategy."""
        if self.selection == "tifl":
            warmup_rounds = 1 if self.fleet == "real" else 0
            phase = {"sync_rounds": self.sync_rounds, "warmup_rounds": warmup_rounds}
            more: dict[str, Any] = {"profiling": "phase", **phase} if self.sync_rounds else {}
            more |= {"policy": self.policy, "seed": self.seed}
            return TiFL(strategy, self.clients_per_round, num_tiers, **more)
        if self.selection == "oort":
            timed = bool(self.sync_rounds)
            return Oort(strategy, self.clients_per_round, profiling=timed, seed=self.seed)
        if self.selection == "power-of-choice":
            return PowerOfChoice(strategy, self.clients_per_round, seed=self.seed)
        if self.selection == "deadline":
            return DeadlineSelection(strategy, self.clients_per_round, seed=self.seed)
        count = None if self.selection == "all" else self.num_wanted
        return RandomSelection(strategy, count, seed=self.seed)

    def _merging(self, strategy: Strategy, num_tiers: int) -> Wrapper:
        """Put a loop without rounds around a strategy."""
        shared: dict[str, Any] = {"concurrency": self.concurrency or None, "seed": self.seed}
        if self.engine == "fedat":
            return FedAT(strategy, self.clients_per_round, num_tiers, seed=self.seed)
        if self.engine == "fedasync":
            return FedAsync(strategy, **shared)
        if self.engine == "fedcompass":
            return FedCompass(strategy, self.fast_steps, STEPS_RATIO * self.fast_steps, **shared)
        return FedBuff(
            strategy,
            buffer_size=self.buffer_size or None,
            weighting=MERGING.get(self.weighting, "fair"),
            **shared,
        )

    @property
    def num_wanted(self) -> int:
        """Nodes that the selection is made for; it goes on with fewer."""
        if self.engine != "rounds":
            return self.num_tiers if self.engine == "fedat" else self.concurrency or 1
        spare = self.spare_clients if self.selection == "over-select" else 0
        wanted = {"tifl": self.num_tiers, "all": 1}
        return wanted.get(self.selection, self.clients_per_round + spare)

    def _stepped(self, strategy: Strategy) -> Wrapper:
        rule = self.step_rule
        gamma = 1.0 if rule == "equal" else None
        budget = "deadline" if rule == "deadline" else "two-class"
        if self.weighting == "fednova":
            return FedNova(strategy, self.fast_steps, budget=budget, gamma=gamma)
        return BiasedLocalSGD(
            strategy,
            self.fast_steps,
            weigh_by_steps=self.weighting == "steps",
            step_correction=CORRECTION.get(self.weighting),
            high_loss_fraction=0.5 if self.sampler == TOP_LOSS else None,
            batch_size=self.batch_size,
            seed=self.seed,
            budget=budget,
            gamma=gamma,
        )

"""Settings of this app, the sampler and the strategy that they describe."""

from dataclasses import dataclass
from typing import Any

from flwr.serverapp.strategy import FedAvg

from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero.errors import invalid
from flwr_hetero.pgd.priority_feed import LAYERS
from flwr_hetero.pgd.sampler import RULES
from flwr_hetero.sampler import PGDSampler
from flwr_hetero.strategy import SamplerFacts
from flwr_hetero.task.settings import Settings

TOPS = (0.5, 1, 2, 5)
"""Top percentages whose share of the loss decrease is shown (the paper's Figure 1b)."""
DIRECTIONS = ("local", "global")


@dataclass(frozen=True)
class PGDSettings(Settings):
    """The run-config of ``apps/pgd``; see its pyproject.toml."""

    num_server_rounds: int = 40
    rule: str = "stochastic"
    renewal_share: float = 0.5
    step_ratio: float = 0.0
    gate: float = 1.5
    layers: str = "last"
    direction: str = "local"
    full_pass: bool = False
    look_every: int = 5
    local_steps: int = 0
    alpha: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (
            ("rule", (*RULES, "uniform")),
            ("layers", LAYERS),
            ("direction", DIRECTIONS),
        ):
            if getattr(self, name) not in known:
                raise invalid(name, getattr(self, name), f"be one of {', '.join(known)}", "choose")
        for name in ("look_every", "local_steps"):
            if getattr(self, name) < 0:
                rule = "be at least 0"
                raise invalid(
                    name.replace("_", "-"), getattr(self, name), rule, "see pyproject.toml"
                )
        if not 0 <= self.step_ratio <= 1:
            raise invalid("step-ratio", self.step_ratio, "lie in [0, 1]", "0 takes batch-size")
        self.sampler(100, seed=0)

    def sampler(self, num_samples: int, seed: int) -> PGDSampler | UniformSampler:
        """Make a node's sampler."""
        batch_size = round(self.step_ratio * num_samples) if self.step_ratio else self.batch_size
        batch_size = max(1, batch_size)
        if self.rule == "uniform":
            return UniformSampler(num_samples, batch_size, seed=seed)
        return PGDSampler(
            num_samples,
            batch_size,
            seed=seed,
            rule=self.rule,
            renewal_share=self.renewal_share,
            gate=self.gate,
        )

    def looks_in(self, server_round: Any) -> bool:
        """Tell whether nodes look at all their priorities in this round."""
        return self.look_every > 0 and (int(server_round) - 1) % self.look_every == 0

    def strategy(self) -> SamplerFacts:
        """Make FedAvg inside a wrapper that notes what the nodes say of their sampling."""
        one = {"min_train_nodes": 1, "min_available_nodes": 1}
        return SamplerFacts(FedAvg(fraction_evaluate=0.0, **one))

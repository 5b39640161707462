"""Settings of this app, the sampler and the strategy that they describe."""

from dataclasses import dataclass
from typing import Any

from flwr.serverapp.strategy import FedAvg

from flwr_hetero.errors import check_choice, check_count, check_number
from flwr_hetero.pgd.priorities import LAYERS
from flwr_hetero.pgd.sampler import RULES
from flwr_hetero.sampler import PGDSampler, UniformSampler
from flwr_hetero.strategy import SamplerMetrics
from flwr_hetero_studies.tasks.settings import Settings

TOPS = (0.5, 1, 2, 5)
"""Top percentages whose share of the loss decrease is shown (the paper's Figure 1b)."""


@dataclass(frozen=True)
class PGDSettings(Settings):
    """The run-config of ``apps/pgd``; see its pyproject.toml."""

    num_server_rounds: int = 40
    rule: str = "stochastic"
    renewal_share: float = 0.5
    step_ratio: float = 0.0
    layers: str = "last"
    full_pass: bool = False
    look_every: int = 5
    local_steps: int = 0
    alpha: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("rule", self.rule, (*RULES, "uniform"))
        check_choice("layers", self.layers, LAYERS)
        check_count("look-every", self.look_every)
        check_count("local-steps", self.local_steps)
        check_number("step-ratio", self.step_ratio, "[0, 1]")
        self.sampler(100, seed=0)

    def sampler(self, num_samples: int, seed: int) -> PGDSampler | UniformSampler:
        """Make a node's sampler."""
        batch_size = round(self.step_ratio * num_samples) if self.step_ratio else self.batch_size
        batch_size = max(1, batch_size)
        if self.rule == "uniform":
            return UniformSampler(num_samples, batch_size, seed=seed)
        share = self.renewal_share
        return PGDSampler(num_samples, batch_size, seed=seed, rule=self.rule, renewal_share=share)

    def looks_in(self, server_round: Any) -> bool:
        """Whether nodes measure all their priorities in this round."""
        return self.look_every > 0 and (int(server_round) - 1) % self.look_every == 0

    def strategy(self) -> SamplerMetrics:
        """Make FedAvg inside a wrapper that keeps the summaries of the nodes' samplers."""
        one = {"min_train_nodes": 1, "min_available_nodes": 1}
        return SamplerMetrics(FedAvg(fraction_evaluate=0.0, **one))

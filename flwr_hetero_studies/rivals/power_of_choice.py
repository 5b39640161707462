"""Power-of-Choice: draw some nodes, and train those with the largest loss."""

from collections.abc import Set
from math import inf, isnan
from typing import Any, ClassVar

import numpy as np
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero.errors import check_count
from flwr_hetero.exchange.context import Exchange
from flwr_hetero.records import read_number
from flwr_hetero.server.selection import Outcome, Selection
from flwr_hetero_studies.rivals import node_memory


class PowerOfChoice(node_memory.NeedsLoss, node_memory.NodeMemory, Selection):
    """Draw candidates by their examples, and train those whose last known loss is largest.

    Cho, Wang and Joshi, "Towards Understanding Biased Client Selection in Federated Learning",
    AISTATS 2022. By default, there are twice as many ``candidates`` (d) as ``clients_per_round``
    (m).

    This is the paper's rpow-d, which sends no message to the candidates: a node's loss is the mean
    of its last training, and nodes that have not trained come first. The paper does not say how a
    node with an unknown number of examples counts. Here it counts as the mean of the others.
    """

    name: ClassVar[str] = "power_of_choice"
    facts = "examples", "loss"
    client_support = (node_memory.loss_support("which are selected again and again"),)

    def __init__(
        self,
        strategy: Strategy | None = None,
        clients_per_round: int = 5,
        candidates: int | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self.count = check_count("clients_per_round", clients_per_round, 1)
        most = 2 * self.count if candidates is None else candidates
        self.candidates = check_count("candidates", most, self.count, "that is clients_per_round")
        self.seed = check_count("seed", seed)
        self.rng = np.random.default_rng(seed)
        super().__init__(strategy, clients_per_round)
        self.loss: dict[str, float] = {}
        self.examples: dict[str, float] = {}

    def select(self, context: Exchange, grid: Grid, online: Set[int]) -> list[int]:
        # Sort by id, because identities may not be known after a resume.
        nodes = sorted(online)
        names = [self.identity(node) for node in nodes]
        usual = float(np.mean(list(self.examples.values()))) if self.examples else 1.0
        weights = np.array([max(self.examples.get(name, usual), 1e-9) for name in names])
        count = min(self.candidates, len(nodes))
        drawn = self.rng.choice(len(nodes), count, replace=False, p=weights / weights.sum())
        largest = sorted(drawn.tolist(), key=lambda i: -self.loss.get(names[i], inf))
        return [nodes[i] for i in largest[: self.count]]

    def on_outcome(self, context: Exchange, good: dict[str, Outcome], failed: list[str]) -> None:
        for node, (_, metrics) in good.items():
            self.examples[node] = read_number(metrics, self._weight_key or "", 1.0)
            loss = node_memory.training_loss(metrics)
            if not isnan(loss):
                self.loss[node] = loss

    def round_info(self) -> dict[str, Any]:
        names = [self.identity(node) for node in self.selected]
        return {"loss": {name: self.loss[name] for name in names if name in self.loss}}

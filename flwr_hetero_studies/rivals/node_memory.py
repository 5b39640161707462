"""What the rivals share that learn about single nodes."""

import json
from typing import ClassVar

import numpy as np

from flwr_hetero.server.profiling import identify_nodes
from flwr_hetero.server.rounds import Run
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import StateDict, check_state, rng_from_str, rng_to_str


class NodeMemory(Wrapper):
    """Save what a strategy has learnt about nodes, and find out who they are after a resume."""

    facts: ClassVar[tuple[str, ...]]
    """Attributes that are saved as JSON: first what is there once a node is known."""
    rng: np.random.Generator

    def on_start(self, run: Run) -> None:
        """After a resume, ask nodes that are not known who they are."""
        if getattr(self, self.facts[0]):
            identify_nodes(self, run.exchange(run.round + 1), run.grid, run.timeout_s)

    def state_dict(self) -> StateDict:
        """Return what is known, and the generator."""
        facts = json.dumps([getattr(self, name) for name in self.facts])
        return {**super().state_dict(), "facts": facts, "rng": rng_to_str(self.rng)}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        check_state(state, {"facts": str, "rng": str}, type(self).__name__)
        super().load_state_dict(state)
        for name, value in zip(self.facts, json.loads(str(state["facts"])), strict=True):
            setattr(self, name, value)
        self.rng = rng_from_str(str(state["rng"]))

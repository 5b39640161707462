"""Settings of this app, and the strategy for them."""

from dataclasses import dataclass

from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian, Strategy

from flwr_hetero.errors import invalid
from flwr_hetero.strategy import CDGraB
from flwr_hetero_studies.papers.cd_grab.herding import HerdingMeter
from flwr_hetero_studies.tasks.settings import Settings

CD_GRAB = "cd-grab"
METHODS = (CD_GRAB, "id-grab", "d-rr", "shuffle-once")
INNER: dict[str, type[FedAvg]] = {
    "fedavg": FedAvg,
    "fedadam": FedAdam,
    "fedavgm": FedAvgM,
    "fedmedian": FedMedian,
}
"""The strategy inside."""


@dataclass(frozen=True)
class OrderSettings(Settings):
    """The run-config of ``apps/cd-grab``; see its pyproject.toml."""

    method: str = CD_GRAB
    mode: str = "sketched"
    sketch_size: int = 1024
    num_units: int = 0
    unit: str = "batch"
    measure: bool = True
    fraction_train: float = 1.0
    inner: str = "fedavg"
    num_server_rounds: int = 60
    partition: str = "iid"
    model: str = "softmax"
    fleet: str = "uniform"
    batch_size: int = 4
    learning_rate: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("method", METHODS)
        self.check_choice("inner", INNER)
        self.check_choice("unit", ("batch", "example"))
        if self.mode == "exact" and self.method != CD_GRAB:
            raise invalid("mode", self.mode, "be sketched without cd-grab", "choose another mode")
        if not 0 < self.fraction_train <= 1:
            raise invalid("fraction-train", self.fraction_train, "lie in (0, 1]", "1 is all nodes")
        self._cd_grab()  # refuses what it cannot take

    def strategy(self) -> Strategy:
        """Make the strategy."""
        strategy: Strategy = INNER[self.inner](
            fraction_train=self.fraction_train,
            fraction_evaluate=0.0,
            min_train_nodes=1,
            min_available_nodes=1,
        )
        if self.method == CD_GRAB:
            strategy = self._cd_grab(strategy)
        return HerdingMeter(strategy) if self.measure else strategy

    def _cd_grab(self, strategy: Strategy | None = None) -> CDGraB:
        return CDGraB(
            strategy,
            mode=self.mode,
            sketch_size=self.sketch_size,
            num_units=self.num_units or None,
            seed=self.seed,
        )

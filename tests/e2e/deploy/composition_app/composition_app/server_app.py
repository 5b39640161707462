"""TiFL around biased local SGD around CD-GraB around FedAdam, recorded."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdam

from flwr_hetero.report import RunDirectory
from flwr_hetero.strategy import BiasedLocalSGD, CDGraB, Recorded, TiFL

app = ServerApp()
DIM = 5


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    leaf = FedAdam(fraction_evaluate=0.0, eta=0.1)
    strategy = TiFL(
        BiasedLocalSGD(CDGraB(leaf, sketch_size=4), fast_steps=8),
        clients_per_round=config["clients-per-round"],
        num_tiers=config["num-tiers"],
        policy="uniform",
        profiling="phase",
        sync_rounds=1,
        warmup_rounds=0,
        seed=config["seed"],
    )
    run_dir = RunDirectory(config["output-dir"], dict(config))
    Recorded(strategy, run_dir=run_dir).start(
        grid,
        ArrayRecord({"w": Array(np.zeros(DIM, np.float32))}),
        num_rounds=config["num-server-rounds"],
        timeout=config["timeout"],
    )

"""A strategy around FedAvg, recorded; models count by steps if a node lies about its own."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

from flwr_hetero.report import RunDirectory
from flwr_hetero.strategy import BiasedLocalSGD, Compressed, FedBuff, Recorded, TiFL

app = ServerApp()
SIZE = 1000


def strategy_for(config) -> Strategy:
    """Make the strategy; tests make the same one for a LocalGrid."""
    inner = FedAvg(fraction_evaluate=0.0)
    if config.get("engine") == "fedavg":
        return Compressed(inner) if config["packed"] else inner
    if config.get("engine") == "buffered":
        return FedBuff(inner, buffer_size=config["clients-per-round"])
    if ":steps" in config["faults"]:
        inner = BiasedLocalSGD(inner, fast_steps=4)
    return TiFL(
        inner,
        clients_per_round=config["clients-per-round"],
        num_tiers=config["num-tiers"],
        policy="vanilla" if config["num-tiers"] == 1 else "uniform",
        profiling="phase",
        sync_rounds=1,
        warmup_rounds=0,
        seed=config["seed"],
    )


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    first = np.zeros(config["size"])
    if config["engine"] == "fedavg":
        # equal parts of a model would be sent once
        first = np.random.default_rng(config["seed"]).normal(size=config["size"])
    run_dir = RunDirectory(config["output-dir"], dict(config), resume=config["resume"])
    Recorded(strategy_for(config), run_dir=run_dir, resume=config["resume"]).start(
        grid,
        ArrayRecord({"w": Array(first.astype(np.float32))}),
        num_rounds=config["num-server-rounds"],
        timeout=config["timeout"],
    )

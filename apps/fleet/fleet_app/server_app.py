"""Build the nest of strategies from the run-config, run it, say where the results are."""

import random
from dataclasses import asdict
from logging import INFO

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from fleet_app.task import FleetSettings
from flwr_hetero.report import RunDirectory
from flwr_hetero.strategy import Recorded
from flwr_hetero.task.server import central_evaluate, initial_arrays

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the parts that the run-config names."""
    settings = FleetSettings.from_run_config(context.run_config)
    random.seed(settings.seed)  # Flower's strategies draw their nodes with it
    strategy = settings.strategy(num_nodes=len(list(grid.get_node_ids())))
    evaluate_fn = central_evaluate(settings)
    path = settings.run_directory("fleet")
    run_dir = RunDirectory(path, asdict(settings), resume=settings.resume)
    Recorded(strategy, run_dir=run_dir, resume=settings.resume).start(
        grid, initial_arrays(settings), settings.num_server_rounds, evaluate_fn=evaluate_fn
    )
    log(INFO, "Results: %s", run_dir.path / "report.html")

"""Build the strategy from the run-config, run it, say where the results are."""

from dataclasses import asdict
from logging import INFO

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from cd_grab_app.task import OrderSettings
from flwr_hetero.report import RunDirectory
from flwr_hetero.strategy import Recorded
from flwr_hetero.task.server import central_evaluate, initial_arrays

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run CD-GraB or one of its baselines."""
    settings = OrderSettings.from_run_config(context.run_config)
    strategy, evaluate_fn = settings.strategy(), central_evaluate(settings)
    path = settings.run_directory("cd-grab")
    run_dir = RunDirectory(path, asdict(settings), resume=settings.resume)
    Recorded(strategy, run_dir=run_dir, resume=settings.resume).start(
        grid, initial_arrays(settings), settings.num_server_rounds, evaluate_fn=evaluate_fn
    )
    log(INFO, "Results: %s", run_dir.path / "report.html")

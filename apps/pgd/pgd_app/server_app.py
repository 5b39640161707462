"""Build the strategy from the run-config, run it, say where the results are."""

from dataclasses import asdict
from logging import INFO

from flwr.app import ConfigRecord, Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from flwr_hetero import keys
from flwr_hetero.report import RunDirectory
from flwr_hetero.strategy import Recorded
from flwr_hetero.task.server import central_evaluate, initial_arrays
from pgd_app.task import PGDSettings

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run PGD or uniform sampling."""
    settings = PGDSettings.from_run_config(context.run_config)
    strategy, evaluate_fn = settings.strategy(), central_evaluate(settings)
    path = settings.run_directory("pgd")
    run_dir = RunDirectory(path, asdict(settings), resume=settings.resume)
    steps = {keys.NUM_STEPS: settings.local_steps} if settings.local_steps else {}
    Recorded(strategy, run_dir=run_dir, resume=settings.resume).start(
        grid,
        initial_arrays(settings),
        settings.num_server_rounds,
        train_config=ConfigRecord(steps),
        evaluate_fn=evaluate_fn,
    )
    log(INFO, "Results: %s", run_dir.path / "report.html")

"""Build the strategy from the run-config and run it."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from cd_grab_app.task import OrderSettings
from flwr_hetero_studies.tasks.run import run_app

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run CD-GraB or one of its baselines."""
    settings = OrderSettings.from_run_config(context.run_config)
    with settings.as_typed():
        strategy = settings.strategy()
    run_app("cd-grab", settings, strategy, grid)

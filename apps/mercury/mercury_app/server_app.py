"""Build the strategy from the run-config and run it."""

from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_hetero import keys
from flwr_hetero_studies.tasks.run import run_app
from mercury_app.task import MercurySettings

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run Mercury or one of its baselines."""
    settings = MercurySettings.from_run_config(context.run_config)
    steps = {keys.NUM_STEPS: settings.local_steps} if settings.local_steps else {}
    with settings.as_typed():
        strategy = settings.strategy()
    run_app("mercury", settings, strategy, grid, ConfigRecord(steps))

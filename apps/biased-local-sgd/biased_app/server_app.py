"""Build the strategy from the run-config and run it."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from biased_app.task import BiasedSettings
from flwr_hetero_studies.tasks.run import run_app

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run biased local SGD or one of its baselines."""
    settings = BiasedSettings.from_run_config(context.run_config)
    with settings.as_typed():
        strategy = settings.strategy()
    run_app("biased-local-sgd", settings, strategy, grid)

"""Build the strategy from the run-config and run it."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fleet_app.task import FleetSettings
from flwr_hetero.exchange.nodes import settled_nodes
from flwr_hetero_studies.tasks.run import run_app

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the parts that the run-config names."""
    settings = FleetSettings.from_run_config(context.run_config)
    num_nodes = len(settled_nodes(grid, settings.num_wanted))
    with settings.as_typed():
        strategy = settings.strategy(num_nodes)
    run_app("fleet", settings, strategy, grid)

"""Run the table in a simulation: ``simulate.py FOLDER NUM_NODES NUM_WORKERS [NAME...]``.

One Ray and one grid serve all rows.
"""

import sys

from flwr.app import Context
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from grid_app import client_app, server_app

app = ServerApp()


@app.main()
def main(grid, context):
    """Run the rows."""
    config = {"rows": " ".join(sys.argv[4:]), "on-nodes": True, "output-dir": sys.argv[1]}
    server_app.main(grid, Context(context.run_id, 0, {}, context.state, config))


if __name__ == "__main__":
    resources = {"init_args": {"num_cpus": int(sys.argv[3])}, "client_resources": {"num_cpus": 1}}
    run_simulation(app, client_app.app, int(sys.argv[2]), backend_config=resources)

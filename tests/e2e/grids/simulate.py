"""Run the table in a simulation: ``simulate.py FOLDER NUM_NODES NUM_WORKERS [NAME...]``.

One Ray and one grid serve all rows. The nodes register a while after the ServerApp began.
"""

import sys
import time

from flwr.app import Context
from flwr.server.superlink.fleet.vce import vce_api
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from grid_app import client_app, server_app

LATE_S = 1.5
app = ServerApp()
register = vce_api._register_nodes


def register_late(num_nodes, state_factory):
    """Let the ServerApp be the first, and see the nodes come."""
    time.sleep(LATE_S)
    return register(num_nodes, state_factory)


@app.main()
def main(grid, context):
    """Run the rows, for a grid that has no node yet."""
    print(f"{len(list(grid.get_node_ids()))} nodes at the start")
    config = {"rows": " ".join(sys.argv[4:]), "on-nodes": True, "output-dir": sys.argv[1]}
    server_app.main(grid, Context(context.run_id, 0, {}, context.state, config))


if __name__ == "__main__":
    vce_api._register_nodes = register_late
    resources = {"init_args": {"num_cpus": int(sys.argv[3])}, "client_resources": {"num_cpus": 1}}
    run_simulation(app, client_app.app, int(sys.argv[2]), backend_config=resources)

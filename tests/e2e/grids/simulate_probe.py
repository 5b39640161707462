"""Ask Flower's simulation the questions of the probe app: ``simulate_probe.py FILE``.

Its grid, state and workers are Flower's; the ClientApp runs here instead of in a Ray actor.
"""

import json
import sys
from pathlib import Path

from flwr.server.superlink.fleet.vce.backend import raybackend
from flwr.server.superlink.fleet.vce.backend.backend import Backend
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from probe_app import client_app, server_app

app = ServerApp()


class Here(Backend):
    """One worker, in this process."""

    num_workers = 1

    def __init__(self, backend_config):
        pass

    def build(self, app_fn):
        """Load the ClientApp."""
        self.app = app_fn()

    def is_worker_idle(self):
        """Say yes: a message waits for its turn."""
        return True

    def terminate(self):
        """End nothing."""

    def process_message(self, message, context):
        """Run the ClientApp."""
        return self.app(message=message, context=context), context


@app.main()
def main(grid, context):
    """Write the answers down."""
    Path(sys.argv[1]).write_text(json.dumps(server_app.probe(grid)))


if __name__ == "__main__":
    raybackend.RayBackend = Here
    run_simulation(app, client_app.app, num_supernodes=3)

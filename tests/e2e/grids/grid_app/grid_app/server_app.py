"""Run rows of the table one after the other on whatever grid there is, and write what comes."""

import json
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from grid_app.rows import ROWS, run

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Write ``NAME.json`` for each row to ``output-dir``."""
    config = context.run_config
    folder = Path(str(config["output-dir"]))
    folder.mkdir(parents=True, exist_ok=True)
    for word in str(config["rows"]).split() or ROWS:
        name, _, rounds = word.partition(":")
        outcome = run(
            name, grid, int(rounds or ROWS[name].rounds), on_nodes=bool(config["on-nodes"])
        )
        (folder / f"{name}.json").write_text(json.dumps(outcome))

"""Send each node one message after another, and write down how long each takes to come back."""

import json
import time
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

from flwr_hetero._flwr import pull_quickly

app = ServerApp()


@app.main()
def main(grid, context):
    pull_quickly()
    folder = Path(str(context.run_config["output-dir"]))
    folder.mkdir(parents=True, exist_ok=True)
    (node,) = grid.get_node_ids()
    with (folder / "messages.jsonl").open("w", buffering=1) as out:
        for _ in range(int(context.run_config["count"])):
            message = Message(RecordDict({"config": ConfigRecord()}), node, "train")
            start_s = time.monotonic()
            ids = list(grid.push_messages([message]))
            replies = []
            while not replies:
                replies = list(grid.pull_messages(ids))
                time.sleep(0.02)
            line = {"seconds": time.monotonic() - start_s}
            (reply,) = replies
            if reply.has_error():
                line["error"] = reply.error.code
            else:
                line |= dict(reply.content["found"])
            out.write(json.dumps(line) + "\n")

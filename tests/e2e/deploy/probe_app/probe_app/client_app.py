"""A node that answers, works for a while, or returns nothing."""

import time

from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def answer(message, context):
    """Do as the message says; an emulated device works in virtual time."""
    does = message.content["config"]["does"]
    if does == "nothing":
        return None
    work_s = 3.0 if does == "work" else 0.0
    if not context.node_config.get("emulated"):
        time.sleep(work_s)
    metrics = MetricRecord({"num-examples": 1, "examples-processed": 100 * work_s})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)

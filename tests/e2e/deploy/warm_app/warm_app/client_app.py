"""Does nothing, with torch, and tells by which process."""

import os

import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
IMPORTED_BY = os.getpid()


@app.train()
def train(message, context):
    last = context.state.config_records.get("last", ConfigRecord({"count": 0}))
    context.state["last"] = ConfigRecord({"count": last["count"] + 1})
    pids = {"pid": os.getpid(), "imported-by": IMPORTED_BY}
    found = MetricRecord(pids | {"count": last["count"], "sum": int(torch.ones(3).sum())})
    return Message(RecordDict({"found": found}), reply_to=message)

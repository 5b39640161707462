"""One node on an emulated fleet, whose ClientApp does what a test's function does."""

import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader, TensorDataset

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import hetero, load_state

NUM = 24
BATCH = 4
FULL = NUM // BATCH
DATA = TensorDataset(torch.randn(NUM, 3, generator=torch.manual_seed(0)), torch.arange(NUM) % 2)


def plain():
    """Make a loader that shuffles."""
    return DataLoader(DATA, BATCH, shuffle=True)


def report(steps, passes=1, job=FULL, size=BATCH):
    """Say what a node reports of its work."""
    found = {"num-steps": steps, "passes": passes}
    found |= {} if job is None else {"job-steps": job}
    return found | ({"examples-processed": steps * size} if size else {})


class Node:
    """A node that answers with a function of message and context, and notes what it returns."""

    def __init__(self, function, *, mods=(hetero,), profile=None, seed=0, **run_config):
        self.function = function
        self.results = []
        app = ClientApp(mods=list(mods))
        for kind in ("train", "evaluate", "query"):
            getattr(app, kind)()(self.answer)
        profiles = [profile or DeviceProfile()]
        self.grid = LocalGrid(app, profiles, seed=seed, run_config=run_config)
        (self.id,) = self.grid.get_node_ids()

    def answer(self, msg, context):
        self.results.append(self.function(msg, context))
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 24})}), reply_to=msg)

    def ask(self, steps=None, kind="train", *, good=True, records=None, **config):
        config |= {"num-steps": steps} if steps else {}
        content = RecordDict({"config": ConfigRecord(config), **(records or {})})
        (reply,) = self.grid.send_and_receive([Message(content, self.id, kind)])
        assert not (good and reply.has_error()), reply.error.reason
        return reply

    def reason(self, steps=None):
        return self.ask(steps, good=False).error.reason

    def work(self, steps=None):
        """Return what the reply says of the steps, but for the time of one and the data's size."""
        found = dict(self.ask(steps).content.config_records.get(keys.WORK, {}))
        return {k: v for k, v in found.items() if k not in (keys.STEP_TIME, keys.DATA_SIZE)}

    @property
    def context(self):
        return self.grid.context(self.id)

    def state(self, name="sampler"):
        return load_state(self.context, name)

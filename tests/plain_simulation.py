"""Flower's simulation on a clock for tests: nodes share workers where devices are not emulated."""

from flwr.app import ConfigRecord

from flwr_hetero import keys
from flwr_hetero._flwr import unavailable
from flwr_hetero.exchange import queue

TICK_S = 0.1
"""Seconds between two looks of the simulation for messages that wait."""


class Time:
    """A clock that goes on only when somebody sleeps."""

    now_s = 0.0

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += max(0.0, seconds)
        assert self.now_s < 1e6, "the run has stalled"


class InMemoryGrid:
    """Let the nodes of a LocalGrid share workers; its devices' times are those of the workers.

    Without ``workers`` the devices are emulated: replies come at once, in any order. What was
    collected is gone: to ask for it again is answered by an error. ``handover_s``: what a worker
    spends between two messages; ``answered``: instruction, worker and seconds of each; ``at_once``:
    messages in flight after each sending.
    """

    def __init__(self, grid, workers, monkeypatch, handover_s=0.0):
        self.hidden = grid
        self.handover_s = handover_s
        self.clock = Time()
        self.free_at_s = [0.0] * workers
        self.replies = {}
        self.collected = set()
        self.asked_again = []
        self.answered = []
        self.at_once = []
        monkeypatch.setattr(queue, "time", self.clock)

    def __getattr__(self, name):
        if name == "virtual_time_s":
            raise AttributeError(name)
        return getattr(self.hidden, name)

    def push_messages(self, messages):
        messages = list(messages)
        if self.free_at_s:
            self.hidden.virtual_time_s = self.clock.now_s
        ids = list(self.hidden.push_messages(messages))
        there_s = (self.clock.now_s // TICK_S + 1) * TICK_S
        for message, message_id in zip(messages, ids, strict=True):
            arrival_s, reply, _ = self.hidden.pending.pop(message_id)
            if not self.free_at_s:
                self.replies[message_id] = 0.0, reply
                continue
            worker = min(range(len(self.free_at_s)), key=self.free_at_s.__getitem__)
            begin_s = max(there_s, self.free_at_s[worker]) + self.handover_s
            took_s = self._stamp(reply, worker)
            if took_s:
                reply.content[keys.TIMING][keys.HANDOVER_TIME] = self.handover_s
            # What has no content is the answer to a node that hangs, or raises.
            end_s = begin_s + took_s if reply.has_content() else max(begin_s, arrival_s)
            self.free_at_s[worker] = end_s
            self.replies[message_id] = end_s, reply
            self.answered.append((message, worker, took_s))
        self.at_once.append(len(self.replies))
        return ids

    def _stamp(self, reply, worker):
        """Write the worker's own times into a reply; return the seconds in the ClientApp."""
        if not reply.has_content():
            return 0.0
        times = reply.content[keys.TIMING]
        took_s = times[keys.TRAIN_TIME]
        times.update({keys.EMULATED: False, keys.WORKER: f"host-{worker}"})
        (metrics,) = reply.content.metric_records.values()
        if steps := metrics.get(keys.NUM_STEPS):
            work = reply.content.config_records.setdefault(keys.WORK, ConfigRecord())
            work[keys.STEP_TIME] = took_s / steps
        return took_s

    def pull_messages(self, message_ids):
        ids = {*message_ids}
        again = ids & self.collected
        there = sorted((self.replies[i][0], i) for i in ids & self.replies.keys())
        here = [i for at_s, i in there if at_s <= self.clock.now_s]
        self.collected.update(here)
        self.asked_again += again
        return [self.replies.pop(i)[1] for i in here] + [unavailable(i) for i in again]

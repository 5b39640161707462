"""The workers that nodes of Flower's simulation share, where devices are not emulated."""

import os
from math import nan
from statistics import median
from typing import NamedTuple

from flwr.app import ConfigRecord, Message

from flwr_hetero import keys
from flwr_hetero.records import configs_in, read_number
from flwr_hetero.slices.algorithm import places_in_flight

FIRST_PLACES = (os.cpu_count() or 1) + 1
"""Messages that are sent before any worker has answered: most simulations have one for each CPU."""


class Usual(NamedTuple):
    """What is expected of a node that has not answered yet; NaN and infinity: nothing."""

    step_s: float = nan
    fixed_s: float = nan
    job_steps: float = float("inf")


class Workers:
    """How many processes answer messages, and how long they take for one."""

    def __init__(self) -> None:
        # Worker and seconds in the ClientApp, of the last replies.
        self._replies: list[tuple[str, float]] = []

    def learn(self, reply: Message, memory: int) -> None:
        """Learn from a reply which worker it is of; of so many replies as are kept."""
        record = configs_in(reply.content).get(keys.TIMING, ConfigRecord())
        worker = record.get(keys.WORKER)
        if isinstance(worker, str):
            self._replies.append((worker, read_number(record, keys.TRAIN_TIME, 0.0)))
        del self._replies[: -max(memory, FIRST_PLACES)]

    @property
    def number(self) -> int:
        """The distinct workers of the last replies."""
        return len({worker for worker, _ in self._replies})

    def places(self, most: int) -> int:
        """Return how many messages keep the workers busy; all nodes' where no worker is known."""
        if not self._replies:
            return most
        job_s = median(seconds for _, seconds in self._replies)
        wanted = places_in_flight(self.number, job_s)
        # Until the first messages have come back, further workers may be busy with them.
        if len(self._replies) < FIRST_PLACES:
            wanted = max(wanted, FIRST_PLACES)
        return min(most, wanted)

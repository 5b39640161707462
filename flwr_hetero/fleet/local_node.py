"""Devices of an emulated fleet, and the processes that run their ClientApp."""

import os
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from math import inf
from multiprocessing import get_context
from multiprocessing.util import Finalize
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from flwr_hetero import keys
from flwr_hetero._flwr import CLIENT_APP_RAISED
from flwr_hetero.client.data_pass import Stream
from flwr_hetero.client.device import DeviceProfile
from flwr_hetero.client.emulation import device_rng, in_config, reply_if_away, stamp
from flwr_hetero.errors import invalid
from flwr_hetero.fleet.faults import Fault, corrupt

Answer = tuple[float, Message | None]
"""When a reply arrives, and the reply; None if there is none."""
LOOK_S = 1.0
"""Seconds between two looks of a worker at whether its parent lives."""
SHARES = 4
"""Parts of the work that a worker fetches one after the other: fewer cost less, more are evener."""


@dataclass
class LocalNode:
    """An emulated device with the state of its ClientApp; it does one job at a time."""

    profile: DeviceProfile
    context: Context
    seed: int
    free_at_s: float = 0.0

    @property
    def partition(self) -> int:
        """The node's ``partition-id``."""
        return int(self.context.node_config[keys.PARTITION_ID])

    def answer(
        self, message: Message, client_app: ClientApp, faults: list[Fault], now_s: float
    ) -> Answer:
        """Run the ClientApp on an instruction; return when the reply arrives, and the reply."""
        rng = device_rng(self.seed, self.partition, message)
        server_round, kind = in_config(message, keys.SERVER_ROUND), message.metadata.message_type
        faults = [fault for fault in faults if fault.hits(self.partition, server_round, kind)]
        if any(fault.kind == "dies" for fault in faults):
            return inf, None
        if away := reply_if_away(message, self.profile, rng):
            return now_s, away
        # what a node draws depends on the message alone, whichever process it works in, and when
        own_seed = int(rng.bit_generator.seed_seq.generate_state(1)[0])
        with Stream(own_seed).used():
            if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
                torch.cuda.manual_seed_all(own_seed)
            reply = self._run(message, client_app, faults)
        stamp(message, reply, self.context, self.profile, rng)
        latency_s = sum(fault.delay_s for fault in faults if fault.kind == "late")
        if reply.has_content():
            times: Any = reply.content[keys.TIMING]
            latency_s += times[keys.TRAIN_TIME] + times[keys.TRANSFER_TIME]
        self.free_at_s = max(self.free_at_s, now_s) + latency_s
        return self.free_at_s, reply

    def _run(self, message: Message, client_app: ClientApp, faults: list[Fault]) -> Message:
        def fail(reason: str) -> Message:
            return Message(Error(CLIENT_APP_RAISED, reason), reply_to=message)

        if any(fault.kind == "errs" for fault in faults):
            return fail("injected error")
        records: dict[str, Any] = dict(message.content.items())
        copy = RecordDict({name: type(record)(dict(record)) for name, record in records.items()})
        # a ClientApp cannot change what other nodes see; arrays are immutable bytes, and shared
        private = Message(copy, metadata=message.metadata)  # type: ignore[call-overload]
        try:
            reply: Any = client_app(private, self.context)
        # any error of a ClientApp becomes its reply, as in Flower
        except Exception as error:
            return fail(f"{type(error).__name__}: {error}")
        if not isinstance(reply, Message):  # an app without a return, for instance
            return fail(f"the ClientApp returned {type(reply).__name__}, not a Message")
        for fault in faults:
            if fault.kind == "garbage" and reply.has_content():
                corrupt(reply.content, fault.corrupt)
        return reply


NodeJob = tuple[LocalNode, list[Message]]
"""Messages that a node got at the same time; it answers one after the other."""


def answer_all(
    job: NodeJob, client_app: ClientApp, faults: list[Fault], now_s: float
) -> list[Answer]:
    """Let a node answer its messages."""
    node, messages = job
    return [node.answer(message, client_app, faults, now_s) for message in messages]


_app: list[ClientApp] = []
"""In a worker: the ClientApp, which it has by the fork, for functions and mods do not pickle."""


class WorkerPool:
    """Forked processes, each with a copy of the ClientApp."""

    def __init__(self, client_app: ClientApp, workers: int) -> None:
        if sys.platform != "linux":
            hint = "more need processes forked from this one, which is safe on Linux only"
            raise invalid("workers", workers, "be 0 or 1 on this system", hint)
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            rule = "be 0 or 1 in a process that has used the GPU: forked ones could not"
            raise invalid("workers", workers, rule, "make the LocalGrid before that")
        self._workers, begin = workers, (client_app, os.getpid())
        self._pool = ProcessPoolExecutor(workers, get_context("fork"), _begin, begin)
        # forks all workers, here and now; Python warns that they lack this process's threads
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pool.submit(os.getpid).result()
        # before the finalizers of multiprocessing's queues (10), or the workers would not be told
        self.close = Finalize(self, _end, (self._pool,), exitpriority=100)

    def answer(self, jobs: list[NodeJob], faults: list[Fault], now_s: float) -> list[list[Answer]]:
        """Let nodes answer their messages, in order for each node; update the nodes."""
        found = []
        try:
            size = max(1, len(jobs) // (SHARES * self._workers))
            work = partial(_work, faults=faults, now_s=now_s)
            done = self._pool.map(work, jobs, chunksize=size)
            # A node's state travels with the job and comes back with the replies (0.05 ms for
            # 80 kB), so that any worker can take any node.
            for (node, _), (after, answers) in zip(jobs, done, strict=True):
                vars(node.context).update(vars(after.context))
                node.free_at_s = after.free_at_s
                found.append(answers)
        except BrokenProcessPool as error:
            left = [node.partition for node, _ in jobs[len(found) :]]
            raise RuntimeError(
                "a worker of LocalGrid was killed (out of memory?) while nodes with these "
                f"partition-ids were at work: {left}; use fewer workers."
            ) from error
        except BaseException:  # a KeyboardInterrupt, for instance
            self.close()
            raise
        return found


def _end(pool: ProcessPoolExecutor) -> None:
    """End the workers; what they are at is finished first, the rest is not begun."""
    # the pool's own thread cannot wait for itself
    in_main = threading.current_thread() is threading.main_thread()
    pool.shutdown(wait=in_main, cancel_futures=True)


def _begin(client_app: ClientApp, parent: int) -> None:
    """Prepare a worker: one thread for torch; it ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a job allows it, see below
    os.environ["OMP_NUM_THREADS"] = "1"
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    _app.append(client_app)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


def _work(job: NodeJob, faults: list[Fault], now_s: float) -> tuple[LocalNode, list[Answer]]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return job[0], answer_all(job, _app[-1], faults, now_s)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

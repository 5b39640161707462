"""Devices of unequal speed: a step takes its time, which depends on the node.

Copied into an app. ``slow`` is a mod inside ``hetero``; ``timed`` is around the server's strategy.
"""

import time

from flwr_hetero.client.hetero import StepLoader

SPEEDS = (4.0, 2.0, 2.0, 1.0, 1.0, 0.5, 0.2, 0.1)
STEP_S = 0.05
device = {"step_s": 0.0}
given = getattr(StepLoader.__iter__, "given", StepLoader.__iter__)


def slowly(loader):
    """Give a loader's batches, each after the pause of the one before."""
    for batch in given(loader):
        yield batch
        time.sleep(device["step_s"])


slowly.given = given


def slow(message, context, call_next):
    """Let this node's steps take their time."""
    partition = int(context.node_config["partition-id"])
    device["step_s"] = STEP_S / SPEEDS[partition % len(SPEEDS)]
    StepLoader.__iter__ = slowly
    return call_next(message, context)


def timed(strategy):
    """Print the seconds from the first update, for until then processes start, to the end."""
    aggregate, start, times_s = strategy.aggregate_train, strategy.start, []

    def noting(*args):
        times_s.append(time.monotonic())
        return aggregate(*args)

    def started(*args, **settings):
        result = start(*args, **settings)
        print(f"seconds {time.monotonic() - times_s[0]:.2f}")
        return result

    strategy.aggregate_train, strategy.start = noting, started
    return strategy

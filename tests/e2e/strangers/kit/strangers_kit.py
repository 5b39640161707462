"""Imported first by an app, in each of its processes: counts what is trained, stands in for hubs.

The app's files stay as they are but for one import. What the app downloads is made here, small.
"""

import functools
import json
import logging
import os
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock

import stand_ins
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.serverapp.strategy.result import Result

from flwr_hetero.server.wrapper import Wrapper

RECORDS = Path(os.environ["STRANGERS_RECORDS"])


def note(kind, **facts):
    """Append a line to what is known of this run; lines of two processes do not mix."""
    line = json.dumps({"kind": kind, "at": time.time()} | facts, default=str) + "\n"
    with open(RECORDS / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
        file.write(line)


class Count:
    """Examples that went through a backward pass and then an optimizer step."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.size = 0  # of the last batch that the model saw with gradients
        self.pending = 0
        self.examples = 0

    def stepped(self, *_):
        self.examples += self.pending
        self.pending = 0


COUNT = Count()


def count_torch():
    """Count by torch's own calls, whatever loop, loader or trainer makes them."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    call, back = torch.nn.Module.__call__, torch.Tensor.backward
    zero = torch.optim.Optimizer.zero_grad
    depth = [0]

    @functools.wraps(call)
    def called(module, *args, **kwargs):
        is_loss = isinstance(module, torch.nn.modules.loss._Loss)
        if not depth[0] and torch.is_grad_enabled() and not is_loss:
            given = [*args, *kwargs.values()]
            sizes = [len(x) for x in given if torch.is_tensor(x) and x.dim() and len(x)]
            if sizes:
                COUNT.size = sizes[0]
        depth[0] += 1
        try:
            return call(module, *args, **kwargs)
        finally:
            depth[0] -= 1

    @functools.wraps(back)
    def backward(tensor, *args, **kwargs):
        COUNT.pending += COUNT.size
        return back(tensor, *args, **kwargs)

    @functools.wraps(zero)
    def zero_grad(optimizer, *args, **kwargs):
        # Gradients that are deleted before a step train nothing.
        COUNT.pending = 0
        return zero(optimizer, *args, **kwargs)

    torch.nn.Module.__call__, torch.Tensor.backward = called, backward
    torch.optim.Optimizer.zero_grad = zero_grad
    register_optimizer_step_post_hook(COUNT.stepped)


def count_sklearn():
    """Count passes of a linear model over its data."""
    from sklearn.linear_model import LogisticRegression

    fit = LogisticRegression.fit

    def counted(model, inputs, *args, **kwargs):
        result = fit(model, inputs, *args, **kwargs)
        COUNT.examples += len(inputs) * int(max(model.n_iter_))
        return result

    LogisticRegression.fit = counted


class Warnings(logging.Handler):
    """Keep what is logged as a warning or worse, by Flower or by flwr-hetero."""

    def emit(self, record):
        note("warning", text=record.getMessage())


def counted(call):
    """Wrap what runs a ClientApp."""

    @functools.wraps(call)
    def answered(app, message, context):
        COUNT.reset()
        facts = {"type": message.metadata.message_type}
        try:
            reply = call(app, message, context)
            records = reply.content.config_records if reply.has_content() else {}
            facts["work"] = dict(records.get("flwr-hetero.work", {}))
            return reply
        except BaseException as error:
            facts["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            note("message", **facts, examples=COUNT.examples)

    return answered


def watched(call):
    """Wrap what runs a ServerApp: the same first model in each run, and its results."""

    @functools.wraps(call)
    def served(app, grid, context):
        results, make = [], Result.__init__

        def made(result, *args, **kwargs):
            make(result, *args, **kwargs)
            results.append(result)

        Result.__init__ = made
        stand_ins.seed(0)
        try:
            return call(app, grid, context)
        except BaseException as error:
            note("failed", error=f"{type(error).__name__}: {error}")
            raise
        finally:
            note("end", results=[told(result) for result in results])

    return served


def noted(aggregate):
    """Wrap what aggregates: when it did is noted."""

    @functools.wraps(aggregate)
    def aggregated(*args, **kwargs):
        note("update")
        return aggregate(*args, **kwargs)

    return aggregated


def told(result):
    """Return the metrics of a result by where they were found, and round."""
    return {
        name: {number: dict(record) for number, record in getattr(result, name).items()}
        for name in (
            "train_metrics_clientapp",
            "evaluate_metrics_clientapp",
            "evaluate_metrics_serverapp",
        )
    }


def install():
    """Put all of this in place, once in a process."""
    logging.getLogger("flwr").addHandler(Warnings(logging.WARNING))
    ClientApp.__call__ = counted(ClientApp.__call__)
    ServerApp.__call__ = watched(ServerApp.__call__)
    # Wrappers make the mean of FedAvg's models themselves.
    for strategy in (FedAvg, Wrapper):
        strategy.aggregate_train = noted(strategy.aggregate_train)
    needs = os.environ["STRANGERS_NEEDS"].split()
    if "torch" in needs:
        count_torch()
    if "sklearn" in needs:
        count_sklearn()
    for name in {"wandb", "evaluate"} & set(needs):
        sys.modules[name] = MagicMock(name=name, __spec__=ModuleSpec(name, None))
    stand_ins.install(needs)


install()

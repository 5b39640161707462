"""What a batch of priorities costs beside a training step, in time and in memory.

Each way is timed in turn in one process; its memory is the growth of the resident peak in a child
process that does nothing else.
"""

import ctypes
import gc
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torchvision import models

from flwr_hetero.pgd.priorities import LayerPriorities
from flwr_hetero.sampler import sample_priorities
from flwr_hetero_studies.papers.pgd.training import LOSS, paper_cnn
from flwr_hetero_studies.tasks import make_model

CHUNK = 16
"""Gradients in memory at once for the chunked per-sample way."""
BRIEF = ("forward + backward", "forward mode", "step with priorities, all",
         "step with priorities, last", "per sample")  # fmt: skip
"""Ways measured on large models."""
Direction = dict[str, Tensor]


def resnet18() -> nn.Module:
    """Take torchvision's network as it is, but for the normalisation, which is by groups."""
    return models.resnet18(
        weights=None, num_classes=10, norm_layer=lambda width: nn.GroupNorm(32, width)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int], int]] = {
    "mlp": (lambda: make_model("mlp", (1, 28, 28), 10), (1, 28, 28), 128),
    "cnn": (lambda: paper_cnn(seed=0), (1, 28, 28), 128),
    "resnet18": (resnet18, (3, 32, 32), 128),
}
"""How it is built, its input, the batch."""


def per_sample(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    direction: Direction,
    chunk_size: int | None = None,
) -> Tensor:
    """Compute priorities by the definition: a vectorised gradient per example."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(point: Direction, one: Tensor, target: Tensor) -> Tensor:
        return LOSS(functional_call(model, point, (one[None],)), target[None])[0]

    each = vmap(grad(loss_of), in_dims=(None, 0, 0), chunk_size=chunk_size)
    gradients = each(parameters, inputs, targets)
    return sum((gradients[name] * direction[name]).flatten(1).sum(1) for name in direction)


def set_up(name: str, batch: int) -> tuple[nn.Module, Tensor, Tensor, Direction]:
    torch.manual_seed(0)
    build, shape, _ = MODELS[name]
    model, inputs, targets = build(), torch.randn(batch, *shape), torch.randint(10, (batch,))
    LOSS(model(inputs), targets).sum().backward()
    return model, inputs, targets, {n: p.grad.clone() for n, p in model.named_parameters()}


def ways(name: str, batch: int) -> dict[str, Callable[[], Tensor | None]]:
    """Give functions without arguments; those that return a tensor return priorities."""
    model, inputs, targets, direction = set_up(name, batch)
    data = (model, LOSS, inputs, targets)
    last = dict(list(direction.items())[-2:])

    def forward() -> None:
        with torch.no_grad():
            LOSS(model(inputs), targets)

    def training_step() -> None:
        model.zero_grad()
        LOSS(model(inputs), targets).sum().backward()

    def listening(layers: str) -> Tensor | None:
        listener = LayerPriorities(model, layers)
        listener.is_checked = True  # once in training, not part of a step's price
        listener.direction = direction
        training_step()
        listener.close()
        return listener.collect(batch)

    return {
        "forward": forward,
        "forward + backward": training_step,
        "forward mode": lambda: sample_priorities(*data, direction),
        "forward mode, last layer": lambda: sample_priorities(*data, last),
        "step with priorities, all": lambda: listening("all"),
        "step with priorities, last": lambda: listening("last"),
        "per sample": lambda: per_sample(model, inputs, targets, direction),
        f"per sample, chunks of {CHUNK}": lambda: per_sample(
            model, inputs, targets, direction, CHUNK
        ),
    }


def errors(name: str, batch: int) -> dict[str, float]:
    """Measure the largest error of each way in single precision, relative to the largest priority.

    The truth are per-sample gradients in double precision; ``double`` is the error of forward
    mode there.
    """
    model, inputs, targets, direction = set_up(name, batch)
    model, inputs = model.double(), inputs.double()
    direction = {name: part.double() for name, part in direction.items()}
    exact = per_sample(model, inputs, targets, direction)
    found = {"double": sample_priorities(model, LOSS, inputs, targets, direction)}
    for way, call in ways(name, batch).items():
        if "last" not in way and "per sample" not in way and (priorities := call()) is not None:
            found[way] = priorities
    return {
        way: float((priorities - exact).abs().max() / exact.abs().max())
        for way, priorities in found.items()
    }


def peak_mb(name: str, batch: int, way: str) -> float:
    """Return the growth of the peak in a child that runs this way once, after a small one."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_report_peak, args=(sender, name, batch, way))
    child.start()
    sender.close()
    try:
        return float(receiver.recv())
    except EOFError:
        return float("nan")  # out of memory
    finally:
        child.join()


def _report_peak(sender: Connection, name: str, batch: int, way: str) -> None:
    torch.set_num_threads(1)
    ways(name, 2)[way]()  # loads kernels and rules
    call = ways(name, batch)[way]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at the present
    before = _status_mb("VmRSS")
    call()
    sender.send(_status_mb("VmHWM") - before)


def _status_mb(field: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if field in x)
    return int(line.split()[1]) / 1024


def measure(name: str, repeats: int, memory: bool) -> dict[str, Any]:
    """Measure all ways on a model; those per sample once."""
    batch = MODELS[name][2]
    calls = ways(name, batch)
    if name == "resnet18":
        calls = {way: calls[way] for way in BRIEF}
    error = errors(name, 4)  # loads kernels and rules, too
    times: dict[str, list[float]] = {way: [] for way in calls}
    for turn in range(repeats):
        for way, call in calls.items():
            if "per sample" in way and turn:
                continue
            start = time.process_time()
            call()
            times[way].append(1e3 * (time.process_time() - start))
    base = float(np.median(times["forward + backward"]))
    rows = [
        {
            "way": way,
            "ms": float(np.median(times[way])),
            "ms_least": min(times[way]),
            "ms_most": max(times[way]),
            "ratio": float(np.median(times[way])) / base,
            "peak_mb": peak_mb(name, batch, way) if memory else float("nan"),
            "relative_error": error.get(way),
        }
        for way in calls
    ]
    return {"ways": rows, "error_in_double": error["double"]}

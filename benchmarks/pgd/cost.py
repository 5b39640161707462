"""What a batch of priorities costs beside a training step, in time and in memory.

Usage: ``python benchmarks/pgd/cost.py [--batch 128] [--repeats 5] [--models mlp cnn resnet18]``.
Writes ``cost.jsonl``, a line per model and way. Each way is timed in turn in one process; its
memory is the growth of the resident peak in a child process that does nothing else.
"""

import argparse
import ctypes
import gc
import json
import multiprocessing
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tasks import paper_cnn
from torch import Tensor, nn
from torchvision import models

from flwr_hetero.pgd.priorities import per_sample_priorities
from flwr_hetero.pgd.priority_feed import LayerPriorities
from flwr_hetero.sampler import sample_priorities
from flwr_hetero.task import make_model

HERE = Path(__file__).parent
LOSS = nn.CrossEntropyLoss(reduction="none")
MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[int, int, int]]]] = {
    "mlp": lambda: (make_model("mlp", (1, 28, 28), 10), (1, 28, 28)),
    "cnn": lambda: (paper_cnn(seed=0), (1, 28, 28)),
    "resnet18": lambda: (resnet18(), (3, 32, 32)),
    "resnet18, 3x3 stem": lambda: (
        contiguous(make_model("resnet18", (3, 32, 32), 10)),
        (3, 32, 32),
    ),
}
"""ResNet-18 with GroupNorm, with its original stem and with the usual one for small images."""
BATCHES = {"resnet18": 128, "resnet18, 3x3 stem": 16}
BRIEF = (
    "forward + backward", "forward mode", "step with priorities, all",
    "step with priorities, last", "per sample",
)  # fmt: skip
"""Ways measured on large models, which have batches of their own."""
CHUNK = 16
"""Gradients in memory at once for the chunked per-sample way."""


def resnet18() -> nn.Module:
    """Take torchvision's network as it is, but for the normalisation."""
    return models.resnet18(
        weights=None, num_classes=10, norm_layer=lambda width: nn.GroupNorm(32, width)
    )


def contiguous(model: nn.Module) -> nn.Module:
    """Lay out kernels as torch does by itself, which suits gradients per sample better."""
    return model.to(memory_format=torch.contiguous_format)


def set_up(name: str, batch: int) -> tuple[nn.Module, Tensor, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, shape = MODELS[name]()
    inputs, targets = torch.randn(batch, *shape), torch.randint(10, (batch,))
    LOSS(model(inputs), targets).sum().backward()
    direction = {name: p.grad.clone() for name, p in model.named_parameters()}
    return model, inputs, targets, direction


def errors(name: str, batch: int = 8) -> dict[str, float]:
    """Measure the largest error of each way in single precision, relative to the largest priority.

    The truth are per-sample gradients in double precision; ``double`` is the error of forward
    mode there.
    """
    model, inputs, targets, direction = set_up(name, batch)
    model.double()
    direction = {name: part.double() for name, part in direction.items()}
    data = (model, LOSS, inputs.double(), targets, direction)
    exact = per_sample_priorities(*data)
    found = {"double": sample_priorities(*data, method="forward")}
    for way, call in ways(name, batch).items():
        if "last" not in way and "per sample" not in way and (priorities := call()) is not None:
            found[way] = priorities
    return {
        way: float((priorities - exact).abs().max() / exact.abs().max())
        for way, priorities in found.items()
    }


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
        listener.direction = direction
        training_step()
        listener.close()
        measured = listener.collect()
        return None if measured is None else measured.priorities

    return {
        "forward": forward,
        "forward + backward": training_step,
        "forward mode": lambda: sample_priorities(*data, direction, method="forward"),
        "double backward": lambda: sample_priorities(*data, direction, method="backward"),
        "difference": lambda: sample_priorities(*data, direction, method="difference"),
        "forward mode, last layer": lambda: sample_priorities(*data, last, method="forward"),
        "step with priorities, all": lambda: listening("all"),
        "step with priorities, last": lambda: listening("last"),
        "per sample": lambda: per_sample_priorities(*data, direction),
        f"per sample, chunks of {CHUNK}": lambda: per_sample_priorities(
            *data, direction, chunk_size=CHUNK
        ),
    }


def peak_mb(name: str, batch: int, way: str) -> float:
    """Growth of the resident peak in a child that runs this way once, after a small one."""
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


def _report_peak(sender, name: str, batch: int, way: str) -> None:
    torch.set_num_threads(1)
    ways(name, 2)[way]()  # loads kernels and rules
    call = ways(name, batch)[way]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status_mb("VmRSS")
    call()
    sender.send(_status_mb("VmHWM") - before)


def _status_mb(field: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if field in x)
    return int(line.split()[1]) / 1024


def measure(name: str, batch: int, repeats: int, slow_repeats: int) -> list[dict[str, object]]:
    batch = BATCHES.get(name, batch)
    calls = ways(name, batch)
    if name in BATCHES:
        calls = {way: calls[way] for way in BRIEF}
    error = errors(name, 4)  # loads kernels and rules, too
    times: dict[str, list[float]] = {way: [] for way in calls}
    for turn in range(repeats):
        for way, call in calls.items():
            if "per sample" in way and turn >= slow_repeats:
                continue
            start = time.process_time()
            call()
            times[way].append(time.process_time() - start)
    base = float(np.median(times["forward + backward"]))
    return [
        {
            "model": name,
            "batch": batch,
            "way": way,
            "ms": 1e3 * float(np.median(times[way])),
            "ms_least": 1e3 * min(times[way]),
            "ms_most": 1e3 * max(times[way]),
            "ratio": float(np.median(times[way])) / base,
            "peak_mb": peak_mb(name, batch, way),
            "relative_error": error.get(way),
            "error_in_double": error["double"],
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        }
        for way in calls
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slow-repeats", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = HERE / "cost.jsonl"
    kept = results.read_text().splitlines() if results.exists() else []
    kept = [line for line in kept if json.loads(line)["model"] not in options.models]
    for name in options.models:
        for line in measure(name, options.batch, options.repeats, options.slow_repeats):
            kept.append(json.dumps(line))
            print(f"{name:9} {line['way']:28} {line['ratio']:7.2f}x {line['peak_mb']:8.0f} MB")
    results.write_text("\n".join(kept) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

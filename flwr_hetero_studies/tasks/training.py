"""The training loop of a node: batches from a sampler, weighted losses, plain SGD."""

import time
from collections.abc import Callable
from math import sqrt
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_hetero.client.batch_sampler import BatchSampler
from flwr_hetero.errors import check_choice, check_count, check_number, invalid
from flwr_hetero_studies.tasks.data import Examples

OnBatch: TypeAlias = Callable[[nn.Module, NDArray[np.int64], Tensor], int | None]
"""Called with model, indices and losses between the backward pass and the step.

It may read or change gradients. It returns how many more examples it ran forward, or what costs as
much.
"""

OPTIMIZERS = {"sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop,
              "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}  # fmt: skip
"""Optimizers by name; only the first two have a momentum."""


class TrainResult(NamedTuple):
    """What a node did."""

    num_steps: int
    examples_processed: int
    examples_scored: int
    loss: float
    loss_rms: float
    step_s: float = 0.0
    """Seconds of a step without the first one, if there are several."""


def train(
    model: nn.Module,
    examples: Examples,
    sampler: BatchSampler,
    *,
    num_steps: int,
    lr: float,
    optimizer: str = "sgd",
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    proximal: float = 0.0,
    on_batch: OnBatch | None = None,
    device: str = "cpu",
) -> TrainResult:
    r"""Take steps on a sampler's batches, with its weights :math:`c_i`, by default of SGD.

    .. math:: w \leftarrow w - \eta \left( \frac{1}{|B|} \sum_{i \in B} c_i \nabla f_i(w)
              + \mu (w - w^0) \right)

    The optimizer starts without state in each call.
    """
    count = sampler.num_samples
    if count != len(examples):
        raise invalid("sampler.num_samples", count, f"be the number of examples, {len(examples)}")
    check_count("num_steps", num_steps, 1)
    check_number("lr", lr, "(0, inf)")
    check_number("proximal", proximal, "[0, inf)")
    where = pick_device(device)
    model.to(where).train()
    examples = examples.to(where)
    params = [p for p in model.parameters() if p.requires_grad]
    # FedProx pulls to the model with which the round began.
    start = [p.detach().clone() for p in params] if proximal else []
    check_optimizer(optimizer, momentum)
    given: dict[str, Any] = {"momentum": momentum} if momentum else {}
    steps = OPTIMIZERS[optimizer](params, lr=lr, weight_decay=weight_decay, **given)
    processed = 0
    scored = 0
    # Sums of losses and of their squares.
    total = torch.zeros(2, dtype=torch.float64, device=where)
    begun_s = time.monotonic()
    for step in range(num_steps):
        if step == 1:
            begun_s = time.monotonic()
        indices, weights = sampler.next_batch()
        steps.zero_grad()
        losses = batch_losses(model, examples, indices)
        (losses * torch.from_numpy(weights).to(losses)).mean().backward()  # type: ignore[no-untyped-call]
        for param, origin in zip(params, start, strict=False):
            if param.grad is not None:
                param.grad.add_(param.detach() - origin, alpha=proximal)
        losses = losses.detach()
        if on_batch is not None:
            scored += on_batch(model, indices, losses) or 0
        steps.step()
        # These losses are those of the forward pass, so that scores cost nothing.
        sampler.update(indices, losses.cpu().numpy().astype(np.float64))
        total += torch.stack([losses.sum(), losses.square().sum()])
        processed += len(indices)
    loss, square = (total / processed).tolist()
    step_s = (time.monotonic() - begun_s) / max(1, num_steps - 1)
    return TrainResult(num_steps, processed, scored, loss, sqrt(square), step_s)


def batch_losses(model: nn.Module, examples: Examples, indices: NDArray[np.int64]) -> Tensor:
    inputs, targets = examples.take(indices)
    return examples.task.losses(model(inputs), targets)


def evaluate(
    model: nn.Module, examples: Examples, batch_size: int = 512, *, device: str = "cpu"
) -> tuple[float, float]:
    """Measure a model: the means over examples of the loss and the accuracy."""
    where = pick_device(device)
    was_training = model.training
    examples = examples.to(where)
    model.to(where).eval()
    loss, right = torch.zeros(2, dtype=torch.float64, device=where)
    with torch.inference_mode():
        for start in range(0, len(examples), batch_size):
            targets = examples.targets[start : start + batch_size]
            outputs = model(examples.inputs[start : start + batch_size])
            loss += examples.task.losses(outputs, targets).sum()
            right += examples.task.accuracy(outputs, targets).sum()
    model.train(was_training)
    return float(loss) / len(examples), float(right) / len(examples)


def pick_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = check_device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        hint = "in a simulation give --federation-config client-resources-num-gpus=0.1"
        raise invalid("device", device, "be visible here", hint)
    return chosen


def check_device(device: str) -> torch.device:
    try:
        return torch.device("cpu" if device == "auto" else device)
    except RuntimeError as error:
        raise invalid("device", device, "be auto, cpu, cuda, cuda:1, ...") from error


def check_optimizer(optimizer: str, momentum: float) -> None:
    check_choice("optimizer", optimizer, OPTIMIZERS)
    check_number("momentum", momentum, "[0, 1)")
    if momentum and optimizer not in ("sgd", "rmsprop"):
        raise invalid("momentum", momentum, f"be 0 with {optimizer}, which has its own")

"""What a batch of priorities costs beside a training step; all ways are timed in turn."""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torchvision import models

from flwr_hetero.pgd.priorities import LayerPriorities
from flwr_hetero.sampler import sample_priorities
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.papers.pgd.tasks import each_loss, paper_cnn
from flwr_hetero_studies.tasks import make_model

SETTINGS = {"repeats": 5}
FAST = {"repeats": 1}
FAST_CASES = ["cost/mlp"]
BATCH = 128
BASE = "forward + backward"
PER_SAMPLE = "per sample"
Shape = tuple[int, ...]


def resnet18(shape: Shape, classes: int) -> nn.Module:
    """Make torchvision's network with normalisation by groups."""
    norm = lambda width: nn.GroupNorm(32, width)  # noqa: E731
    return models.resnet18(weights=None, num_classes=classes, norm_layer=norm)


MODELS: dict[str, tuple[Callable[[Shape, int], nn.Module], Shape]] = {
    "mlp": (lambda shape, classes: make_model("mlp", shape, classes), (1, 28, 28)),
    "cnn": (paper_cnn, (1, 28, 28)),
    "resnet18": (resnet18, (3, 32, 32)),
}
"""How the model is built, and the shape of its input."""


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    for name in MODELS:
        case = {"experiment": "cost", "name": name, "batch": BATCH}
        yield Trial(case, 0, {"repeats": options.settings["repeats"]}, alone=True)


def run(case: Case, seed: int, data: Data, repeats: int) -> dict[str, Any]:
    """Measure every way on a model; gradients per sample once."""
    # the first calls load kernels and rules
    for call in ways(case["name"], 4).values():
        call()
    calls = ways(case["name"], case["batch"])
    times: dict[str, list[float]] = {way: [] for way in calls}
    for turn in range(repeats):
        for way, call in calls.items():
            if way != PER_SAMPLE or turn == 0:
                start = time.process_time()
                call()
                times[way].append(1e3 * (time.process_time() - start))
    base_ms = median(times[BASE])
    rows = []
    for way, measured in times.items():
        row = {"way": way, "ms": median(measured), "ms_least": min(measured)}
        row |= {"ms_most": max(measured), "ratio": median(measured) / base_ms}
        rows.append(row)
    return {"metrics": {"ways": rows}}


def ways(name: str, batch: int) -> dict[str, Callable[[], Tensor | None]]:
    """Return functions without arguments; those that return a tensor return priorities."""
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model = build(shape, 10)
    inputs = torch.randn(batch, *shape)
    targets = torch.randint(10, (batch,))
    direction: dict[str, Tensor] = {}

    def forward() -> None:
        with torch.no_grad():
            each_loss(model(inputs), targets)

    def step() -> None:
        model.zero_grad()
        each_loss(model(inputs), targets).sum().backward()

    def forward_mode() -> Tensor:
        return sample_priorities(model, each_loss, inputs, targets, direction)

    def listen(layers: str) -> Tensor | None:
        """Take priorities during a training step."""
        listener = LayerPriorities(model, layers)
        listener.direction = direction
        step()
        listener.close()
        return listener.collect(batch)

    def per_sample() -> Tensor:
        """Compute priorities by the definition: a vectorised gradient per example."""
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss_of(point: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
            return each_loss(functional_call(model, point, (one[None],)), target[None])[0]

        gradients = vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, inputs, targets)
        parts = [(gradients[name] * part).flatten(1).sum(1) for name, part in direction.items()]
        return torch.stack(parts).sum(0)

    step()
    direction |= {name: p.grad.clone() for name, p in model.named_parameters()}
    return {
        "forward": forward,
        BASE: step,
        "forward mode": forward_mode,
        "step with priorities, all": lambda: listen("all"),
        "step with priorities, last": lambda: listen("last"),
        PER_SAMPLE: per_sample,
    }

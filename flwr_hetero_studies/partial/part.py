"""A CNN of blocks, the part of it that a node trains, and the memory that training takes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from flwr_hetero_studies.tasks.models import channels_last

WIDTHS = (8, 16, 32, 64)
BATCH = 32
MOMENTUM = 0.9
BUDGET = 1 / 3
"""Memory of a small device, as a share of what training the whole model takes."""
SHARES = 64
"""A narrower model has a whole number of this many parts of the widths."""
CHUNK = 8
"""Images that go through frozen blocks at once; in eval mode an image's result is its own."""
Shape = tuple[int, ...]
Builder = Callable[[Shape, int], nn.Sequential]


def blocks(channels: int, widths: Iterable[int], num_classes: int) -> nn.Sequential:
    """Make blocks of convolution, pooling, BatchNorm and ReLU, and a last one that classifies."""
    made: list[nn.Module] = []
    for width in widths:
        convolve = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        made.append(nn.Sequential(convolve, nn.MaxPool2d(2), nn.BatchNorm2d(width), nn.ReLU()))
        channels = width
    last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
    return nn.Sequential(*made, last)


def whole(shape: Shape, num_classes: int) -> nn.Sequential:
    return blocks(shape[0], WIDTHS, num_classes)


def narrow(shape: Shape, num_classes: int) -> nn.Sequential:
    """Make the widest model of the same depth that fits a small device."""
    return blocks(shape[0], narrow_widths(shape, num_classes), num_classes)


def halved(shape: Shape, num_classes: int) -> nn.Sequential:
    """Make the whole model for images of half the height and width, which fits a small device."""
    first, *others = whole(shape, num_classes).children()
    return nn.Sequential(nn.Sequential(nn.AvgPool2d(2), *first.children()), *others)


@lru_cache
def narrow_widths(shape: Shape, num_classes: int) -> tuple[int, ...]:
    limit = budget(shape, num_classes)
    for share in range(SHARES, 0, -1):
        widths = tuple(max(1, round(width * share / SHARES)) for width in WIDTHS)
        if need_bytes(Part(blocks(shape[0], widths, num_classes)), shape) <= limit:
            return widths
    raise ValueError("no model of this depth fits")


class Part(nn.Module):
    """A model of which some blocks are trained, by default all.

    The blocks before the first trained one save nothing for a backward pass. The frozen ones after
    it pass the gradient on, and so save what they need for that. BatchNorm of frozen blocks uses
    its running statistics and does not change them.
    """

    def __init__(self, model: nn.Sequential, trained: Set[int] | None = None) -> None:
        super().__init__()
        self.blocks = model
        self.trained = frozenset(range(len(model)) if trained is None else trained)
        self.first = min(self.trained)
        for place, block in enumerate(model):
            block.requires_grad_(place in self.trained)
        self.train()

    def train(self, mode: bool = True) -> "Part":
        super().train(mode)
        for place, block in enumerate(self.blocks):
            block.train(mode and place in self.trained)
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        if self.first:
            front = self.blocks[: self.first]
            with torch.no_grad():
                inputs = torch.cat([front(images) for images in torch.split(inputs, CHUNK)])
        outputs: Tensor = self.blocks[self.first :](inputs)
        return outputs

    def trained_state(self) -> dict[str, Tensor]:
        state = self.blocks.state_dict()
        return {name: x for name, x in state.items() if int(name.split(".")[0]) in self.trained}


def load(
    build: Builder, state: Mapping[str, Tensor], shape: Shape, num_classes: int
) -> nn.Sequential:
    """Make a model with these values."""
    # Drawing values that are replaced at once would take time.
    with torch.device("meta"):
        model = build(shape, num_classes)
    model.load_state_dict(state, assign=True)
    channels_last(model)
    return model


def example(shape: Shape, batch: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(batch, *shape), torch.zeros(batch, dtype=torch.int64)


def need_bytes(part: Part, shape: Shape, batch: int = BATCH) -> int:
    """Measure what a step holds beside model and batch: activations, gradients, momentum.

    The activations are those that autograd saves, or those of a frozen front if they are more.
    """
    inputs, targets = example(shape, batch)
    kept = [*part.parameters(), *part.buffers(), inputs]
    given = {tensor.untyped_storage().data_ptr() for tensor in kept}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # A tensor that two operations save is held once.
        if storage.data_ptr() not in given:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # The loss keeps the graph, and with it each saved tensor at an address of its own.
        loss = cross_entropy(part(inputs), targets)
    del loss
    # A gradient and a momentum are as large as their parameter.
    state = 2 * sum(p.nbytes for p in part.parameters() if p.requires_grad)
    return state + max(sum(saved.values()), *front_bytes(part, inputs))


def front_bytes(part: Part, inputs: Tensor) -> Iterator[int]:
    """Yield what each frozen block of the front holds: its input, and two results of a layer."""
    yield 0
    chunk = inputs[:CHUNK]
    with torch.no_grad():
        for block in list(part.blocks.children())[: part.first]:
            # The convolution of a block has its largest result.
            largest = next(iter(block.children()))(chunk)
            yield chunk.nbytes + 2 * largest.nbytes
            chunk = block(chunk)


@lru_cache
def budget(shape: Shape, num_classes: int) -> float:
    return BUDGET * need_bytes(Part(whole(shape, num_classes)), shape)


@lru_cache
def last_blocks(shape: Shape, num_classes: int) -> Set[int]:
    """Return as many of the last blocks as fit a small device."""
    model = whole(shape, num_classes)
    for first in range(len(model)):
        trained = {*range(first, len(model))}
        if need_bytes(Part(model, trained), shape) <= budget(shape, num_classes):
            return trained
    raise ValueError("not even the last block fits")


@lru_cache
def small_batch(shape: Shape, num_classes: int) -> int:
    """Return the largest batch with which the whole model fits a small device."""
    part = Part(whole(shape, num_classes))
    limit = budget(shape, num_classes)
    return max(b for b in range(1, BATCH + 1) if need_bytes(part, shape, b) <= limit)


def peak_bytes(part: Part, shape: Shape, batch: int) -> int:
    """Measure with torch's profiler the most that two steps of SGD allocate at a time."""
    inputs, targets = example(shape, batch)
    channels_last(part)
    parameters = [p for p in part.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.0, momentum=MOMENTUM)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(2):
            optimizer.zero_grad()
            cross_entropy(part(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return int(max(accumulate(size for _, size in changes)))

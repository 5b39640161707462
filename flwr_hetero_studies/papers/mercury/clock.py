"""What a step costs on the paper's testbed: ResNet-18 on Jetson TX1 behind Wi-Fi."""

from dataclasses import dataclass
from functools import lru_cache

from flwr_hetero.client.device import (
    FORWARD_SHARE,
    WIFI_SECONDS_PER_EXAMPLE,
    DeviceProfile,
    compute_time_s,
    transfer_time_s,
)

BYTES = 45e6
"""Size of ResNet-18."""
BATCH = 32
SAMPLES = 50_000
"""Examples of CIFAR-10, on all devices together."""
MBPS = (10, 50, 100, 200)
SMALL_CNN_BYTES = 4 * 20_490
"""Size of the model for which the emulated Wi-Fi fleets give seconds per example."""
WARM = 3
"""Steps after which one that overlaps with the next is like any other."""


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step's parts: computing, exchanging gradients, scoring all local data."""

    compute_s: float
    exchange_s: float
    score_all_s: float

    @property
    def hidden_share(self) -> float:
        """Return the part of the local data that can be scored during an exchange."""
        return min(1.0, self.exchange_s / self.score_all_s)

    def step_s(self, share: float = 0.0, *, is_hidden: bool = True) -> float:
        parts = (share * self.score_all_s, self.exchange_s)
        return self.compute_s + (max(parts) if is_hidden else sum(parts))


def costs(mbps: float, workers: int = 4) -> StepCosts:
    per_example_s = WIFI_SECONDS_PER_EXAMPLE * BYTES / SMALL_CNN_BYTES
    device = DeviceProfile(1.0, mbps, mbps, seconds_per_example=per_example_s)
    return StepCosts(
        compute_s=compute_time_s(device, BATCH),
        exchange_s=transfer_time_s(device, BYTES, BYTES),
        score_all_s=compute_time_s(device, 0, SAMPLES / workers),
    )


@lru_cache
def resnet18_layers() -> tuple[tuple[float, float], ...]:
    """Return each layer's share of ResNet-18's work and of its bytes, first to last."""
    # weights of a layer, and the side of its outputs
    layers = [(9 * 3 * 64, 32)]
    inputs = 64
    for width, side in ((64, 32), (128, 16), (256, 8), (512, 4)):
        layers += [(9 * before * width, side) for before in (inputs, width, width, width)]
        inputs = width
    layers.append((512 * 10, 1))
    all_work = sum(weights * side**2 for weights, side in layers)
    all_weights = sum(weights for weights, _ in layers)
    return tuple((w * side**2 / all_work, w / all_weights) for w, side in layers)


def overlapped_s(cost: StepCosts) -> float:
    """Return the seconds of a step whose transfers overlap with computing, as TicTac's do."""
    layers = resnet18_layers()
    forward_s = FORWARD_SHARE * cost.compute_s
    backward_s = (1 - FORWARD_SHARE) * cost.compute_s
    now = 0.0
    arrives = [0.0] * len(layers)
    starts = []
    for _ in range(WARM):
        starts.append(now)
        # a layer's forward pass waits for its own gradient only
        for (work, _), arrived in zip(layers, arrives, strict=True):
            now = max(now, arrived) + work * forward_s
        link = now
        waiting: dict[int, float] = {}
        for number in reversed(range(len(layers))):
            now += layers[number][0] * backward_s
            waiting[number] = now
        while waiting:
            # the link is idle until some layer is ready
            link = max(link, min(waiting.values()))
            # TicTac: the first layer's is needed first
            number = min(n for n, ready in waiting.items() if ready <= link)
            del waiting[number]
            link += layers[number][1] * cost.exchange_s
            arrives[number] = link
    return starts[-1] - starts[-2]

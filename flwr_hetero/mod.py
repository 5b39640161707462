"""ClientApp mods: measured time and emulated devices; steps by instruction; a sampler's state."""

from flwr_hetero.client.emulation import emulated_device
from flwr_hetero.client.follow import follow
from flwr_hetero.client.keep import keep, load_state, restore, save_state
from flwr_hetero.client.step_loader import StepLoader
from flwr_hetero.client.timing import timing

__all__ = [
    "StepLoader",
    "emulated_device",
    "follow",
    "keep",
    "load_state",
    "restore",
    "save_state",
    "timing",
]

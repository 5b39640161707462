"""ClientApp mods: the client's part of every method in one, and its pieces."""

from flwr_hetero.client.emulation import emulated_device
from flwr_hetero.client.hetero import Hetero, StepLoader, hetero
from flwr_hetero.client.preload import preload
from flwr_hetero.client.samplers import follow, keep, load_state, restore, save_state
from flwr_hetero.client.timing import timing

__all__ = [
    "Hetero",
    "StepLoader",
    "emulated_device",
    "follow",
    "hetero",
    "keep",
    "load_state",
    "preload",
    "restore",
    "save_state",
    "timing",
]

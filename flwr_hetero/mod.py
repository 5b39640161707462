"""ClientApp mods: measured time and emulated devices; a sampler's state in the context."""

from flwr_hetero.client.emulation import emulated_device
from flwr_hetero.client.keep import keep, load_state, restore, save_state
from flwr_hetero.client.timing import timing

__all__ = ["emulated_device", "keep", "load_state", "restore", "save_state", "timing"]

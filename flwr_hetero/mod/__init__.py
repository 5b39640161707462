"""ClientApp mods: measured time and emulated devices; a sampler's state in the context."""

from flwr_hetero.mod.emulation import emulated_device
from flwr_hetero.mod.keep import keep
from flwr_hetero.mod.state import load_state, restore, save_state
from flwr_hetero.mod.timing import timing

__all__ = ["emulated_device", "keep", "load_state", "restore", "save_state", "timing"]

"""Fast federated training on fleets of unequal devices, as a Flower plugin.

Strategies (server side) are in :mod:`flwr_hetero.strategy`, samplers (node side)
in :mod:`flwr_hetero.sampler`, ClientApp mods in :mod:`flwr_hetero.mod`, emulated
fleets in :mod:`flwr_hetero.fleet`. The algorithms themselves, NumPy only, are in
:mod:`flwr_hetero.core`. Importing this package needs neither torch nor ray.
"""

__version__ = "0.1.0"

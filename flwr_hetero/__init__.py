"""Fast federated training on fleets of unequal devices, as a Flower plugin.

Strategies (server side) are in :mod:`flwr_hetero.strategy`, samplers (node side) in
:mod:`flwr_hetero.sampler`, ClientApp mods in :mod:`flwr_hetero.mod`, emulated fleets in
:mod:`flwr_hetero.fleet`. Each paper is a folder, with its algorithm on NumPy arrays:
:mod:`flwr_hetero.tifl`, :mod:`flwr_hetero.biased_local_sgd`, :mod:`flwr_hetero.cd_grab`,
:mod:`flwr_hetero.mercury`, :mod:`flwr_hetero.pgd`. Importing it needs neither torch nor ray.
"""

__version__ = "0.2.0"

"""The experiments of PGD."""

from flwr_hetero.reproduce.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = ()

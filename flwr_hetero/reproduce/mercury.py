"""The experiments of Mercury."""

from flwr_hetero.reproduce.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = ()

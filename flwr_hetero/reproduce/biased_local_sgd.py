"""The experiments of Biased local SGD."""

from flwr_hetero.reproduce.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = ()

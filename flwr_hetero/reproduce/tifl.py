"""The experiments of TiFL."""

from flwr_hetero.reproduce.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = ()

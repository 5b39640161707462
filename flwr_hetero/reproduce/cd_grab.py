"""The experiments of CD-GraB."""

from flwr_hetero.reproduce.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = ()

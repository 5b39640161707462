"""Several runs on one page: who reaches the same quality how much sooner, and why."""

from flwr_hetero.report.compare.groups import Comparison, compare, read_runs

__all__ = ["Comparison", "compare", "read_runs"]

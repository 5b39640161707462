"""Apps of Flower's older API: ``NumPyClient`` and ``client_fn`` under strategies of today's."""

from flwr_hetero.older.clients import OlderClients

__all__ = ["OlderClients"]

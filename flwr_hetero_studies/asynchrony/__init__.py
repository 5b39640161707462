"""Training without rounds against FedAvg."""

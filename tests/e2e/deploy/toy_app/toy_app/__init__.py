"""The smallest federated task, with faults on request."""

"""The smallest federated task, with nodes that misbehave on request."""

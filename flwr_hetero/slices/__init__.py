"""FedSlice: no rounds to wait for, a slice of steps for each node, and an average of models."""

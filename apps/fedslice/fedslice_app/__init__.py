"""FedSlice: nodes train for slices of time, and nobody waits for the slowest."""

"""A NumPyClient of the older API under FedSlice."""

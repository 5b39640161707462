"""A NumPyClient of the older API."""

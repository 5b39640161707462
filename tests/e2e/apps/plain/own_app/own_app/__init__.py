"""A short app of its own, in NumPy."""

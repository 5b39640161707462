"""The papers as pure functions on NumPy arrays: no torch, no Flower, no clock."""

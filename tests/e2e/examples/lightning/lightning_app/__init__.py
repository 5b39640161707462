"""A Flower app with PyTorch Lightning: a small classifier."""

"""A first Flower app."""

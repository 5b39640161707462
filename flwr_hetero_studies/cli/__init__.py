"""Commands of the studies."""

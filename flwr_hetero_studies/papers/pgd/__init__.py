"""The experiments of PGD; ``experiments.toml`` lists them."""

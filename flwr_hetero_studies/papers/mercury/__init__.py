"""The experiments of Mercury; ``experiments.toml`` lists them."""

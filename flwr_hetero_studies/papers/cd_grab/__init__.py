"""The experiments of CD-GraB; ``experiments.toml`` lists them."""

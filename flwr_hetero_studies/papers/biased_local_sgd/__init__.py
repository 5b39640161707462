"""The experiments of biased local SGD; ``experiments.toml`` lists them."""

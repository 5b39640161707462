"""The experiments of TiFL; ``experiments.toml`` lists them."""

"""Which sampler when."""

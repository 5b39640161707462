"""TiFL: tiers of equally fast nodes (Chai et al., HPDC 2020)."""

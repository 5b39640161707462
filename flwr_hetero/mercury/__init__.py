"""Mercury: importance sampling on the node (Zeng et al., SenSys 2021)."""

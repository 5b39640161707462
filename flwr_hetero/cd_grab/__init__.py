"""CD-GraB: coordinated example orders (Cooper et al., NeurIPS 2023)."""

"""CD-GraB: example orders that nodes find together."""

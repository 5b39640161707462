"""Real seconds: methods raced on SuperNodes of unequal CPU shares, over TLS."""

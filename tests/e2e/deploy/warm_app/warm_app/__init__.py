"""Messages without work, timed."""

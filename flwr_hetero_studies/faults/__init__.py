"""Faults of real processes, and long runs."""

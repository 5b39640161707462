"""Biased local SGD: more steps and high-loss examples on fast nodes."""

"""Biased local SGD on an emulated or real fleet of fast and slow devices."""

"""Rivals: methods that a user might pick instead."""

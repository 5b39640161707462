"""Four of our five methods at once on the smallest task that has orders and losses."""

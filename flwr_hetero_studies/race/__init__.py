"""Every method tuned alike on fleets, at equal concurrency."""

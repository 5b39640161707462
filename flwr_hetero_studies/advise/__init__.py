"""Which settings suit a fleet: emulate it for a minute, train a small task, rank the settings."""

"""All five systems on one fleet, each part switched by run-config."""

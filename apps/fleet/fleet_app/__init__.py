"""FedSlice, its rivals and the other methods on one fleet, each part switched by run-config."""

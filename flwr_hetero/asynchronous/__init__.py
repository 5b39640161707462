"""FedBuff, and the engine without rounds for every rule that says when to update."""

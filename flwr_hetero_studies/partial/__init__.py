"""Whether small devices should train the part of the model that fits into their memory."""

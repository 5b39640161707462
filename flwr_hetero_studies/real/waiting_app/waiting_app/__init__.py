"""A Flower app without torch, so that twenty nodes load it quickly on one machine."""

"""FedSlice and FedAvg in Flower's simulation, with clients that are equally fast."""

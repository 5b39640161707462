"""PGD: prioritised gradient descent on the nodes of an emulated or real fleet."""

"""PGD: prioritised gradient descent."""

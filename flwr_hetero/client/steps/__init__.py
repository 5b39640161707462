"""A message's steps: the loader that gives them, where its pass goes on, what is reported."""

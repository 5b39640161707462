collect_ignore = ["quickstart"]  # a Flower app, with imports of its own

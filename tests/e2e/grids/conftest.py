collect_ignore = ["simulate.py", "grid_app"]  # programs that tests run

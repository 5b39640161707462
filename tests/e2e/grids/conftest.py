collect_ignore = ["simulate_rows.py", "simulate_probe.py", "grid_app"]  # programs that tests run

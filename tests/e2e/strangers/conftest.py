collect_ignore = ["kit"]  # imported by apps

"""What every strategy shares."""

"""What judges the methods of flwr_hetero: tasks, rivals, the papers' experiments, races."""

"""A Flower app with XGBoost: trees of all nodes, bagged."""

"""A Flower app with scikit-learn: logistic regression by partial fits."""

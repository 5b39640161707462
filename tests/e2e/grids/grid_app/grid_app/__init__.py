"""One small task, one table of strategies: the same on every grid."""

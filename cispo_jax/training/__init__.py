"""Training: the optimizer, the jitted update, supervised warm starts, checkpoints and metrics."""

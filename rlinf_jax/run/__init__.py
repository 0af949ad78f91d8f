"""One training run: its loop, checkpoints, metrics and console."""

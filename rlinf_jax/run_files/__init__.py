"""The files of a run: checkpoints, metrics, logs, results and their lock."""

"""Tasks: problems, verifiers and worked examples."""

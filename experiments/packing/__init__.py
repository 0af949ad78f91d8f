"""Training on completions in packed rows."""

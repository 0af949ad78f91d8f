"""GRPO on sums: three seeds, and a control with shuffled rewards."""

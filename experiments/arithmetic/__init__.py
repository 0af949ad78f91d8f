"""Sums by GRPO: three seeds, and a control that is rewarded at random."""

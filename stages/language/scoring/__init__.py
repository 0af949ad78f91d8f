"""Scores of completions: padded or packed, and the balance of experts."""

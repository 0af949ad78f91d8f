"""Functions in processes of their own, each call with limits."""

"""Reinforcement learning as pure functions over batches."""

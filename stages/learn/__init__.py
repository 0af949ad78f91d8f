"""Losses, advantages, minibatches and optimizer steps."""

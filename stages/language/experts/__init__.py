"""Mixtures of experts in language models: balance, and replay of routes."""

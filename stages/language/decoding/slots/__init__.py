"""Slots of continuous batching: their cache, its kernels, and their rows."""

"""Engines that are not ours, and act in a policy's place."""

"""Simulators as Worlds: batches of them, in processes of their own."""

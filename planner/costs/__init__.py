"""Costs of stages, transfers and memory: counted, modeled and measured."""

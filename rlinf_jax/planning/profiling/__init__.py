"""Measured seconds: of stages, of host calls and of this machine's links."""

"""Demonstrations of robots, from episodes on disk in any known format."""

"""Demonstrations of robots from folders in LeRobot's format."""

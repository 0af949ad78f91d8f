"""Measures how fast values get from process to process."""

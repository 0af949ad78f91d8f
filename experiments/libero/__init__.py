"""A scripted controller for LIBERO, recorded."""

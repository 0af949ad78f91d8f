"""The plans that a search may choose from."""

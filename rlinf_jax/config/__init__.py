"""Recipes in gin: reading them, checking them, and what is said of errors."""

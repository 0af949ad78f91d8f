"""Small networks that act in environments, and their critics."""

"""Meshes, and layouts of arrays by the dimension letters in their names."""

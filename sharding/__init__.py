"""Geometry: meshes, and layouts spelt by the letters in an array's name."""

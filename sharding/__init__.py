"""Geometry: meshes, and layouts spelled by the letters in an array's name."""

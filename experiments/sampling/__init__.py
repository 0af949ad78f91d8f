"""Top-k and top-p of large vocabularies."""

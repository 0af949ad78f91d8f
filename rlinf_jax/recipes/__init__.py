"""Small starting models and demonstration data, made on the spot."""

"""The state that steps carry: read in parts by its holders, and its files."""

"""RLPD with and without demonstrations."""

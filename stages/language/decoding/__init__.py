"""Decoding with a cache of keys and values, by static batches or in slots."""

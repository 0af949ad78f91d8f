"""The speed of JAX environments."""

"""How fast worlds of JAX are."""

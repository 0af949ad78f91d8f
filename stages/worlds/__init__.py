"""Worlds to act in, in pure JAX: they run where the policy runs."""

"""Modeled memory, arithmetic and communication beside the compiler's."""

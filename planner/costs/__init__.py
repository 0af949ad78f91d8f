"""What stages, moves and memory cost: counted, modeled and measured."""

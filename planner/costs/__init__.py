"""What stages, moves and memory cost: counted, modelled and measured."""

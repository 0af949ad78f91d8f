"""The cost of a pool of simulators."""

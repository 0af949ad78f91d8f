"""FLOPs, bytes and memory of a stage, counted from its jaxpr."""

"""Models: `flax.linen` modules whose parameters name their dimensions."""

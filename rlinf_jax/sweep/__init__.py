"""Grid sweeps over gin bindings."""

"""Language models that act over many turns, in text environments with tools."""

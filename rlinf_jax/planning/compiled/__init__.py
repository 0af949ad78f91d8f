"""Plans compiled for accelerators that are not here."""

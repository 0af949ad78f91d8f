"""Shows where the time of a step goes: the figures that motivate planning."""

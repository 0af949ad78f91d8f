"""Parts of a transformer: attention, rotary positions, experts, rounding."""

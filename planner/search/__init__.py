"""Which plan is the fastest."""

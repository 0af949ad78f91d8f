"""What a pool of simulators costs."""

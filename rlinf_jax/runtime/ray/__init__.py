"""Places in other processes, started and connected by Ray."""

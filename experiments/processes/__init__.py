"""Places in processes against places in one process, on the real job."""

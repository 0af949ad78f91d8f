"""The machine and the front door: the train loop, configuration, disks."""

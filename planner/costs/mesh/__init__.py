"""Models a call on the devices of a mesh: layout, communication, memory."""

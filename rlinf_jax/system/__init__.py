"""This process in its operating system: memory, end, messages, whole files."""

"""How fast values get from process to process."""

"""Makes what recipes start from: converted and tiny models, demonstrations."""

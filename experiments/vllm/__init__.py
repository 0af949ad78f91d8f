"""What acting by vLLM costs."""

"""All algorithms for language models, from one warm start."""

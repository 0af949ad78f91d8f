"""Vision transformers, and the pre-processing of their pictures."""

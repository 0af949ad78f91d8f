"""A GRPO step with completions of a long tail, against TRL."""

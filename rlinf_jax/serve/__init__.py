"""An endpoint that speaks OpenAI's API before a policy, and records calls."""
